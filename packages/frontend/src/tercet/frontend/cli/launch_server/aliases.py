"""SGLang's server options that `tercet serve` has under another name or with other values, and those that it lacks."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tercet.frontend.parsers.sglang_names import REASONING_PARSERS, TOOL_PARSERS
from tercet.frontend.supervisor.options import CHOICES, ConfigError

MODEL = "MODEL"
"""The positional argument of `tercet serve`."""
ValueOf = Callable[[str], str | None]
"""Our value for one of SGLang's, None to leave the option out. Raises ConfigError for a value without an equal."""


class Alias(NamedTuple):
    """Option of SGLang and its equal."""

    name: str
    ours: str
    """MODEL, an option, or an option with its value, as in `--task=embed`, for a flag."""
    value: ValueOf | None = None
    """How the value maps; without it, the value is the same."""
    values: str = ""
    """Values that differ, for the documentation."""
    fallback: bool = False
    """Another option of the command line that sets the same one comes first."""


def _renamed(names: Mapping[str, str]) -> ValueOf:
    """Return a map of some values; others stay the same."""
    return lambda value: names.get(value, value)


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in names.items())


_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def _whole_number(value: str) -> str:
    """Return a number such as 25.6k or 32Ki in digits; others as they are, which the option's own check refuses."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", value.strip())
    return value if match is None else str(round(float(match[1]) * _UNITS[match[2]]))


def _chunk(value: str) -> str | None:
    return None if value == "-1" else value


def _adapter(value: str) -> str:
    """Return NAME=PATH for an adapter as SGLang has it: NAME=PATH, PATH, or an object with both."""
    if not value.startswith("{"):
        return value if "=" in value else f"{value}={value}"
    try:
        adapter = json.loads(value)
        return f"{adapter['lora_name']}={adapter['lora_path']}"
    except (ValueError, KeyError):
        raise ConfigError(f"--lora-paths {value}: an object needs a lora_name and a lora_path") from None


def _quantization(value: str) -> str:
    if value in CHOICES["quantization"]:
        return value
    raise ConfigError(
        f"--quantization {value}: leave it out for a quantized checkpoint, whose config.json says so; "
        "int8 and int4 round other weights as they are loaded"
    )


def _template(value: str) -> str:
    if Path(value).expanduser().exists():
        return value
    raise ConfigError(
        f"--chat-template {value}: there is no such file, and SGLang's built-in templates have no name here; "
        "without the option, the model's own template is used"
    )


def _expert_location(value: str) -> str | None:
    """Return the file of expert loads; None for experts in equal runs, SGLang's default."""
    if value == "trivial":
        return None
    if value.endswith(".json"):
        return value
    raise ConfigError(
        f"--init-expert-location {value}: give a .json file with the `logical_count` of each layer and expert; "
        "--scheduler.expert-load-file writes one"
    )


_DTYPES = {"half": "float16", "float": "float32"}
_KV_DTYPES = {"bf16": "bfloat16"}
_ROUTING = {
    "auto": "cache_aware",
    "total_requests": "least_loaded",
    "total_tokens": "least_loaded",
    "follow_bootstrap_room": "cache_aware",
}
_ATTENTION = {"intel_amx": "cpu"}
ALIASES = (
    Alias("--model-path", MODEL),
    Alias("--tp-size", "--tensor-parallel-size"),
    Alias("--tokenizer-worker-num", "--frontend-workers"),
    Alias("--detokenizer-worker-num", "--detokenizer-workers"),
    Alias("--admin-api-key", "--admin-key"),
    Alias("--smg-grpc-mode", "--grpc-mode"),
    Alias("--lora-paths", "--lora", _adapter, "`NAME=PATH`; a path alone is its own name"),
    Alias("--max-loras-per-batch", "--max-loras"),
    Alias("--enable-lora", "--max-loras=8", fallback=True),
    Alias("--is-embedding", "--task=embed"),
    Alias("--dtype", "--dtype", _renamed(_DTYPES), _listed(_DTYPES)),
    Alias("--kv-cache-dtype", "--kv-cache-dtype", _renamed(_KV_DTYPES), _listed(_KV_DTYPES)),
    Alias("--load-format", "--load-format", _renamed({"gguf": "auto"}), _listed({"gguf": "auto"})),
    Alias("--quantization", "--quantization", _quantization, "`int8` and `int4`; checkpoints say their own"),
    Alias("--context-length", "--context-length", _whole_number, "also `32k` and `32Ki`"),
    Alias("--max-total-tokens", "--max-total-tokens", _whole_number, "also `32k` and `32Ki`"),
    Alias("--chunked-prefill-size", "--chunked-prefill-size", _chunk, "-1 is the default: prompts are always chunked"),
    Alias(
        "--max-prefill-tokens",
        "--chunked-prefill-size",
        _whole_number,
        "unless `--chunked-prefill-size` is given, which bounds all tokens of a step",
        fallback=True,
    ),
    Alias("--max-queued-requests", "--scheduler.max-queued-requests"),
    Alias("--enable-priority-scheduling", "--schedule-policy=priority"),
    Alias("--disable-overlap-schedule", "--scheduler.overlap=0"),
    Alias("--device", "--scheduler.device"),
    Alias(
        "--init-expert-location",
        "--scheduler.init-expert-location",
        _expert_location,
        "`trivial`, or a .json file with `logical_count`",
    ),
    Alias("--ep-num-redundant-experts", "--scheduler.ep-num-redundant-experts"),
    Alias("--grammar-backend", "--scheduler.grammar-backend"),
    Alias("--attention-backend", "--attention-backend", _renamed(_ATTENTION), _listed(_ATTENTION)),
    Alias("--load-balance-method", "--frontend.routing-policy", _renamed(_ROUTING), _listed(_ROUTING)),
    Alias("--chat-template", "--chat-template", _template, "a file; SGLang's names of templates are refused"),
    Alias("--tool-call-parser", "--tool-call-parser", _renamed(TOOL_PARSERS), _listed(TOOL_PARSERS)),
    Alias("--reasoning-parser", "--reasoning-parser", _renamed(REASONING_PARSERS), _listed(REASONING_PARSERS)),
    Alias("--allowed-media-domains", "--allowed-media-host", None, "with a port that differs from 80 and 443"),
    Alias("--log-level", "--log-level", str.lower, "upper case, too"),
    Alias("--log-requests", "--log-requests", None, "without a level, level 0, which has no prompts; SGLang has 2"),
    Alias("--log-requests-format", "--log-format", None, "of all log lines"),
)

IGNORED: Mapping[str, str] = {
    "--enable-metrics": "`/metrics` is always there",
    "--enable-cache-report": "usage always has `prompt_tokens_details.cached_tokens`",
    "--enable-response-store": "responses are stored unless `--response-store none` is given",
    "--enable-mixed-chunk": "a step always has chunks of prompts beside decodes",
    "--skip-tokenizer-init": "requests may always have `input_ids`, and answers have `output_ids`",
    "--skip-server-warmup": "the server is ready after steps of its own, without requests",
    "--sleep-on-idle": "an idle server always sleeps",
    "--schedule-conservativeness": "a request that lacks memory later is retracted and resumes",
    "--random-seed": "requests without a `seed` get a random one each; give a `seed` for equal answers",
    "--stream-interval": "tokens are sent as soon as they are there",
    "--disable-cuda-graph": "steps that have no graph run without one, and results are equal",
    "--enable-dp-lm-head": "with --enable-dp-attention, each rank has the whole head, and computes logits of some rows",
    "--enable-torch-compile": "models use fused kernels of their own",
    "--enable-multimodal": "a model that reads images always does",
    "--watchdog-timeout": "a scheduler whose step hangs is always restarted, and its requests continue elsewhere",
}
"""Options without effect, each with the reason. They change speed or ask for what is always so."""

INSTEAD: Mapping[str, str] = {
    "--trust-remote-code": "Tercet never runs code that comes with a model: leave it out",
    "--tokenizer-path": "the tokenizer is the one in the model's directory: put its files there",
    "--revision": "download the revision with `hf download --revision`, and give the directory as MODEL",
    "--download-dir": "set the variable HF_HUB_CACHE",
    "--model-impl": "an architecture without modules here runs on transformers' by itself",
    "--json-model-override-args": "change the config.json in the model's directory",
    "--weight-version": "`/update_weight_version` names the weights of a running server",
    "--hf-chat-template-name": "give the template as a file with --chat-template",
    "--sampling-defaults": "the model's generation_config.json has the defaults: change it there",
    "--return-output-ids": "`/generate` answers with `output_ids`",
    "--return-input-ids": "`/tokenize` answers with the ids of a chat",
    "--base-gpu-id": "set CUDA_VISIBLE_DEVICES, or use --scheduler.device cuda:N",
    "--gpu-id-step": "set CUDA_VISIBLE_DEVICES",
    "--numa-node": "start the command under numactl",
    "--speculative-num-draft-tokens": "use --scheduler.speculative-tokens",
    "--enable-hierarchical-cache": "size the one KV cache with --kv-cache-bytes or --mem-fraction-static",
    "--enable-trace": "use --otlp-endpoint with the URL of a collector",
    "--otlp-traces-endpoint": "use --otlp-endpoint with the URL of a collector that takes OTLP by HTTP",
    "--crash-dump-folder": "dumps are in --scheduler.state-dir, as docs/guides/troubleshooting.md says",
    "--expert-distribution-recorder-mode": "use --scheduler.expert-load-file, which is written each minute",
    "--encoder-only": "use --encoders N; for schedulers of other hosts: `tercet-scheduler --encoder-only`",
    "--language-only": "use --encoders N; beside encoders of other hosts: `tercet-scheduler --language-only`",
    "--encoder-urls": "use --encoders N, or name the addresses of encoders to frontends with --scheduler",
    "--fastapi-root-path": "let the proxy remove the prefix",
    "--log-level-http": "use --frontend.access-log true for a line per request",
    "--uvicorn-access-log-exclude-prefixes": "use --frontend.access-log true for a line per request",
}
"""What to use instead of an option, where that differs from its group."""

GROUPS: Mapping[str, str] = {
    "device": "see docs/configuration.md for the options of processes and devices",
    "disagg": "prefill and decode run in one scheduler; use --dp-size for more schedulers",
    "exec": "kernels and their communication are chosen by themselves; use --attention-backend for attention",
    "lora": "use --lora, --max-loras and --max-lora-rank",
    "memory": "there is one KV cache, in the memory of the model; use --kv-cache-bytes to size it",
    "mm": "models that read images do so without options, as docs/guides/images.md says",
    "model": "weights are safetensors or GGUF in a directory or on Hugging Face; use --load-format and --dtype",
    "observability": "see docs/guides/metrics.md, docs/guides/logs.md and docs/guides/traces.md",
    "parallel": "use --tensor-parallel-size, --pipeline-parallel-size and --dp-size",
    "schedule": "use --schedule-policy, --chunked-prefill-size and --max-running-requests",
    "serving": "see docs/configuration.md for the options of the server",
    "spec": "tokens are drafted from the prompt and the output; use --scheduler.speculative-tokens",
    "server_args": "kernels are chosen by themselves",
}
"""What to use instead of the options of a group, which is a file of SGLang's options."""
