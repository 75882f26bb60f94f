"""Whole models with quantized weights, and with 8-bit keys and values: correctness and speed.

The reference has the dequantized weights of the checkpoint, in float32, on a CPU, in plain torch. Both compute the
log-probabilities of given tokens (`given_tokens`).
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tercet.kernels.ops.quantized import EightBits
from tercet.kernels.triton.linear.choices import architecture, table
from tercet.scheduler.testing.mxfp4_checkpoints import write_mxfp4
from tercet.scheduler.testing.quantized_checkpoints import Tensors, quantization_config, write_checkpoint
from tools.gpu_stages.executor import SETTLING, decoded
from tools.gpu_stages.given_tokens import LEAST, SHARE, Prompts, far_from, scored, verdict, wrong_of
from tools.gpu_stages.kernels import ceilings_of
from tools.gpu_stages.processes import gathered
from tools.gpu_stages.scale import Results, Scale, model_directory
from tools.gpu_stages.worker import NOBODY, Offline

_PROMPTS = Prompts(places=[NOBODY] * 3, decoded=[range(3), [0]])
_TIMES = 1.5
"""Allowed error of quantized weights, as a multiple of that of 16-bit weights: codes are exact in 16 bits."""

_FP8_CACHE = "fp8_e4m3"


@dataclass(frozen=True)
class _Form:
    """Form of a model. `kind` is that of a checkpoint, or none for unquantized weights."""

    kind: str = ""
    cache: str = "auto"
    attention: str = "auto"
    size: float = 0.0
    """Bytes of a weight, with its share of scales and zero points as kernels read them."""
    rounds: EightBits | None = None
    """Format to which a GPU may round activations."""


_COMPARED = {
    "full": _Form(),
    "full, plain attention": _Form(attention="torch_native"),
    "fp8 tensor": _Form("tensor", rounds="fp8"),
    "fp8 channel": _Form("channel"),
    "fp8 block": _Form("deepseek", rounds="fp8"),
    "int8": _Form("int8", rounds="int8"),
    "awq": _Form("awq"),
    "gptq": _Form("gptq"),
    "gptq row": _Form("gptq row"),
    "mxfp4": _Form("mxfp4"),
    "full, fp8 cache": _Form(cache=_FP8_CACHE),
    "fp8 channel, fp8 cache": _Form("channel", _FP8_CACHE),
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "sliding_window": 24,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
}
"""Model for mxfp4: each token goes through all experts, so that rounding cannot choose others."""
_TIMED = {
    "full": _Form(),
    "full, fp8 cache": _Form(cache=_FP8_CACHE),
    "fp8": _Form("tensor", size=1),
    "fp8, activations in full": _Form("channel", size=1),
    "fp8 block": _Form("deepseek", size=1 + 4 / 128**2),
    "int8": _Form("int8", size=1),
    "int4": _Form("awq", size=0.5 + 8 / 128),
}
"""fp8 has a scale for each output, of activations in 8 bits or in full; int4, AWQ and GPTQ become the same layout."""

_ROUNDING: dict[EightBits, float] = {"fp8": 0.2, "int8": 0.06}
"""Allowed RMS error by rounded activations, as a share of the spread of log-probabilities: an estimate."""


def compare(scale: Scale) -> Iterator[Results]:
    """Yield the distance of each form's log-probabilities from the reference, and the allowed distance."""
    for found in gathered(partial(_compare, scale), _COMPARED, min(1, scale.processes)):
        yield {"compared": found, "wrong": wrong_of(found)}


def _compare(scale: Scale, name: str) -> Iterator[Results]:
    with tempfile.TemporaryDirectory() as directory:
        yield _compared(_COMPARED[name], Path(directory), scale)


def _compared(form: _Form, directory: Path, scale: Scale) -> Results:
    config = scale.compared.config(scale.compared_tokens)
    mine = directory / "model"
    if form.kind == "mxfp4":
        full = write_mxfp4(mine, config | _GPT_OSS)
    else:
        full = write_checkpoint(form.kind or "channel", mine, config, scale.grain, beside=_kv_scales(config))
    reference = replace(scale, device=torch.device("cpu"), dtype=torch.float32)
    uncached = _scored(full, reference, "auto", attention="torch_native")
    plain = far_from(_scored(full, scale, "auto", attention=form.attention), uncached)
    if not form.kind and form.cache == "auto":
        return verdict(plain, SHARE * float(uncached.std()), f"{SHARE} of the spread of log-probabilities")
    wanted, why = uncached, "what the same weights in full differ by here"
    if form.cache != "auto":
        wanted = _scored(full, reference, form.cache, attention="torch_native")
        why += " and a cache in 8 bits by itself"
    far = far_from(_scored(mine if form.kind else full, scale, form.cache), wanted)
    allowed = _TIMES * (plain + far_from(wanted, uncached)) + LEAST
    if form.rounds is not None and architecture(scale.device) in table():
        allowed += _ROUNDING[form.rounds] * float(uncached.std())
        why += ", and what rounded activations may"
    return verdict(far, allowed, f"{_TIMES} times {why}")


def _kv_scales(config: dict[str, Any]) -> Tensors:
    """Return scales of every layer's keys and values: none is 1, and all differ."""
    names = [(layer, name) for layer in range(config["num_hidden_layers"]) for name in ("k_scale", "v_scale")]
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.011 * (place + 1))
        for place, (layer, name) in enumerate(names)
    }


def _scored(directory: Path, scale: Scale, cache: str, *, attention: str = "auto") -> torch.Tensor:
    """Return the log-probabilities of all tokens of all prompts but the first, float32 [tokens]."""
    return torch.cat(scored(directory, scale, _PROMPTS, cache=cache, attention=attention))


def time_forms(scale: Scale) -> Iterator[Results]:
    """Yield milliseconds per token of all layers of the large model in each form, with random weights."""
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    for found in gathered(partial(_time, scale, copy), _TIMED, min(1, scale.processes)):
        yield {"timed": found}


def _time(scale: Scale, copy: float, name: str) -> Iterator[Results]:
    yield {"layers": scale.large.layers}
    yield from _timed(_TIMED[name], scale, copy)


def _timed(form: _Form, scale: Scale, copy: float) -> Iterator[Results]:
    shape, slots = scale.large, max(scale.quantised_batches)
    decodes = scale.decodes + SETTLING
    more = {"quantization_config": quantization_config(form.kind, scale.grain)} if form.kind else {}
    size = scale.dtype.itemsize
    head = shape.vocab * shape.hidden
    weights = head * size + (shape.weights - head) * (form.size or size)
    cached = shape.cached * (1 if form.cache == _FP8_CACHE else size)
    with model_directory(shape, scale.context + decodes + 64, **more) as directory:
        offline = Offline(directory, scale, slots=slots, prompt=scale.context, decodes=decodes, cache=form.cache)
        seconds = min(offline.prefill(slot, scale.context) for slot in range(slots))
        yield {"prefill_tokens_per_s": scale.context / seconds}
        for batch in scale.quantised_batches:
            yield {f"batch {batch}": decoded(offline, scale, batch, copy, weights=weights, cached=cached)}
        offline.worker.close()
