"""What `tools/gpu_check.py` finds out, a stage a function: each gives what is written under "results"."""

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercet.kernels.attention.select import backend_names
from tercet.kernels.bench import Figure, ceilings, figures
from tercet.kernels.check import OPS, check_attention, verdict
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.triton.checks import CHECKS
from tercet.kernels.triton.figures import fused_figures
from tercet.protocol.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.tp_worker import TpModelWorker, WorkerOptions
from tercet.scheduler.model_files import TOKENIZER_FILES, resolve_model

Results = dict[str, Any]
PAGE_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """A model's size, by the names of config.json."""

    architecture: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    @property
    def weights(self) -> int:
        """Parameters that one token reads."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    def config(self, context: int) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": [self.architecture],
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": context,
            "rope_theta": 500000.0,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is: that of the figures to reach, or tiny for a test of the stages themselves."""

    device: torch.device
    dtype: torch.dtype
    large: Shape
    """Llama-3.1-8B."""
    others: dict[str, Shape]
    batches: tuple[int, ...] = (1, 32, 256)
    context: int = 1024
    prompt: int = 8192
    decodes: int = 200
    requests: int = 500
    longest_input: int = 4096
    longest_output: int = 2048
    small_requests: int = 256
    small_lengths: tuple[int, int] = (100, 1024)
    prefix: int = 2048
    operation_tokens: int = 16384
    operation_width: int = 4096
    operation_rows: int = 64


LLAMA_8B = Shape("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128, 128_256)
QWEN_06B = Shape("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True)
QWEN_14B = Shape("Qwen3ForCausalLM", 5120, 17408, 40, 40, 8, 128, 151_936)
FULL = Scale(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    large=LLAMA_8B,
    others={"qwen3-0.6b": QWEN_06B, "qwen3-14b": QWEN_14B},
)

MakeEngine = Callable[..., AbstractContextManager[Any]]
"""`tercet.frontend.engine.Engine`, or what stands in for it."""


def machine(scale: Scale) -> Results:
    """The ceilings that every other figure is held against."""
    copy, product = ceilings(scale.device, scale.dtype)
    return {"copy_gb_per_s": copy.achieved, "bf16_tflop_per_s": product.achieved / 1000}


def correctness(scale: Scale) -> Results:
    """Every attention backend and every operation against its definition, on this device."""
    checks = {f"attention {name}": lambda name=name: check_attention(name, scale.device) for name in backend_names()}
    checks |= {name: lambda op=op: op(scale.device) for name, op in {**OPS, **CHECKS}.items()}
    found = {}
    with torch.inference_mode():
        for name, run in checks.items():
            try:
                found[name] = verdict(run) or "ok"
            except UnavailableBackendError as error:
                found[name] = f"not here: {error}"
    wrong = sorted(name for name, word in found.items() if word != "ok" and not word.startswith("not here"))
    return {"checks": found, "wrong": wrong}


def operations(scale: Scale) -> Results:
    """Each operation's share of the ceiling."""
    with torch.inference_mode():
        ceiling = {figure.unit: figure.achieved for figure in ceilings(scale.device, scale.dtype)}
        found: list[Figure] = list(figures(scale.device, scale.dtype, "auto"))
        width, vocab = scale.operation_width, scale.large.vocab
        sizes = {"tokens": scale.operation_tokens, "hidden": width, "vocab": vocab, "rows": scale.operation_rows}
        found += fused_figures(scale.device, scale.dtype, **sizes)
    return {
        figure.name: {"achieved": figure.achieved, "unit": figure.unit, "share": figure.achieved / ceiling[figure.unit]}
        for figure in found
    }


@contextmanager
def model_directory(shape: Shape, context: int) -> Iterator[Path]:
    """A model of a shape without weights, with the embedded model's tokenizer, which nothing here asks."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        embedded = resolve_model("embedded")
        for file in TOKENIZER_FILES:
            if file not in ("config.json", "generation_config.json") and (embedded / file).is_file():
                shutil.copy(embedded / file, path / file)
        (path / "config.json").write_text(json.dumps(shape.config(context)), encoding="utf-8")
        yield path


class Offline:
    """A worker whose slots all hold a prompt and go on from there: no core, no sockets."""

    def __init__(self, directory: Path, scale: Scale, batch: int, prompt: int, attention: str = "auto") -> None:
        self.batch, self.prompt, self.length = batch, prompt, prompt
        self.pages = -(-(prompt + scale.decodes + 8) // PAGE_SIZE)
        self.worker = TpModelWorker(
            WorkerOptions(
                model=directory,
                dtype=str(scale.dtype).removeprefix("torch."),
                device=str(scale.device),
                load_format="dummy",
                slots=batch,
                context_length=self.pages * PAGE_SIZE,
                step_tokens=max(prompt, batch),
                attention_backend=attention,
                grammar_backend="none",
            )
        )

    def prefill(self, slot: int) -> float:
        """Seconds of one slot's prompt."""
        vocab = self.worker.capacity.vocab_size
        init = SlotInit(
            slot=slot,
            tokens=pack_ints((7919 * slot + 31 * place) % vocab for place in range(self.prompt)),
            prompt_tokens=self.prompt,
            choice=0,
            sampling=SamplingParams(max_new_tokens=1 << 20, temperature=0.0),
        )
        pages = PageUpdate(slot, 0, [list(range(slot * self.pages, (slot + 1) * self.pages))])
        plan = Plan(step=slot, introduce=[init], pages=[pages], rows=[Row(slot, 0, self.prompt, sample=True)])
        return self._run(plan)[0]

    def decode(self) -> tuple[float, list[int]]:
        """(seconds, tokens) of one more for every slot."""
        rows = [Row(slot, self.length, 1, sample=True) for slot in range(self.batch)]
        self.length += 1
        return self._run(Plan(step=self.length, rows=rows))

    def _run(self, plan: Plan) -> tuple[float, list[int]]:
        start = time.perf_counter()
        tokens = self.worker.submit(plan).result().token_ids
        return time.perf_counter() - start, tokens


def model(scale: Scale) -> Results:
    """How many greedy tokens of a shallow model are those of plain torch attention, before rounding parts them."""
    shape = Shape(**{**vars(scale.large), "layers": 2})
    said: dict[str, list[int]] = {}
    with model_directory(shape, scale.context * 2) as directory:
        for name in ("auto", "torch_native"):
            offline = Offline(directory, scale, 1, min(scale.context, 256), name)
            offline.prefill(0)
            said[name] = [offline.decode()[1][0] for _ in range(min(scale.decodes, 64))]
    alike = next(
        (i for i, pair in enumerate(zip(*said.values(), strict=True)) if pair[0] != pair[1]), len(said["auto"])
    )
    return {"tokens": len(said["auto"]), "alike": alike}


def decode(scale: Scale) -> Results:
    """Milliseconds a token of the large model, beside the time that its bytes take to be read."""
    copy = machine(scale)["copy_gb_per_s"] * 1e9
    shape, size = scale.large, scale.dtype.itemsize
    found = {}
    with model_directory(shape, scale.context * 2) as directory:
        for batch in scale.batches:
            offline = Offline(directory, scale, batch, scale.context)
            for slot in range(batch):
                offline.prefill(slot)
            steps = [offline.decode()[0] for _ in range(scale.decodes)]
            steady = steps[len(steps) // 2 :]  # graphs are recorded by then
            cached = batch * scale.context * shape.layers * 2 * shape.kv_heads * shape.head_dim * size
            limit = (shape.weights * size + cached) / copy
            median = statistics.median(steady)
            found[f"batch {batch}"] = {
                "ms_per_token": median * 1e3,
                "limit_ms": limit * 1e3,
                "share_of_limit": limit / median,
            }
            del offline
    return found


def prefill(scale: Scale) -> Results:
    """Tokens a second of long prompts, beside what the machine's matrix products allow."""
    rate = machine(scale)["bf16_tflop_per_s"] * 1e12
    with model_directory(scale.large, scale.prompt * 2) as directory:
        offline = Offline(directory, scale, 4, scale.prompt)
        seconds = min(offline.prefill(slot) for slot in range(4))
    speed = scale.prompt / seconds
    return {"tokens_per_s": speed, "share_of_matmul": speed * 2 * scale.large.weights / rate}


def _served(make_engine: MakeEngine, shape: Shape, requests: list[tuple[list[int], int]], **options: Any) -> Results:
    """All requests at once through the whole of Tercet but HTTP."""
    longest = max(len(ids) + output for ids, output in requests)
    with model_directory(shape, longest + 8) as directory:
        start = time.perf_counter()
        with make_engine(str(directory), load_format="dummy", **options) as engine:
            ready = time.perf_counter() - start
            start = time.perf_counter()
            answers = engine.generate(
                input_ids=[ids for ids, _ in requests],
                sampling_params=[
                    {"max_new_tokens": output, "ignore_eos": True, "temperature": 0.0} for _, output in requests
                ],
            )
            seconds = time.perf_counter() - start
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    return {"ready_s": ready, "seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}


def _random_requests(
    count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab: int
) -> list[tuple[list[int], int]]:
    chance = random.Random(0)
    return [
        ([chance.randrange(vocab) for _ in range(chance.randint(*inputs))], chance.randint(*outputs))
        for _ in range(count)
    ]


def offline(scale: Scale, make_engine: MakeEngine) -> Results:
    """Requests of random lengths without a shared prefix."""
    longest = (1, scale.longest_input), (1, scale.longest_output)
    requests = _random_requests(scale.requests, *longest, scale.large.vocab)
    return _served(make_engine, scale.large, requests, max_running_requests=256, chunked_prefill_size=8192)


def small_models(scale: Scale, make_engine: MakeEngine) -> Results:
    """mini-sglang's offline benchmark, on the shapes it uses."""
    found = {}
    for name, shape in scale.others.items():
        requests = _random_requests(scale.small_requests, scale.small_lengths, scale.small_lengths, shape.vocab)
        found[name] = _served(make_engine, shape, requests, max_running_requests=256, chunked_prefill_size=8192)
    return found


def shared_prefix(scale: Scale, make_engine: MakeEngine) -> Results:
    """Nine requests in ten begin alike; with the prefix cache and without it."""
    chance = random.Random(1)
    vocab = scale.large.vocab
    common = [chance.randrange(vocab) for _ in range(scale.prefix)]
    requests = []
    for number in range(scale.small_requests):
        own = [chance.randrange(vocab) for _ in range(scale.prefix if number % 10 == 0 else 0)]
        tail = [chance.randrange(vocab) for _ in range(64)]
        requests.append(((own or common) + tail, 32))
    common_options = {"max_running_requests": 256, "chunked_prefill_size": 8192}
    cached = _served(make_engine, scale.large, requests, **common_options)
    plain = _served(make_engine, scale.large, requests, disable_radix_cache=True, **common_options)
    return {"cached": cached, "plain": plain, "ratio": plain["seconds"] / cached["seconds"]}


STAGES: dict[str, Callable[[Scale], Results]] = {
    "machine": machine,
    "correctness": correctness,
    "model": model,
    "operations": operations,
    "decode": decode,
    "prefill": prefill,
}
SERVED_STAGES: dict[str, Callable[[Scale, MakeEngine], Results]] = {
    "offline": offline,
    "small_models": small_models,
    "shared_prefix": shared_prefix,
}
"""Those that start Tercet's processes."""
