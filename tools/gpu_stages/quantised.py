"""Whole models with weights in few bits, and with keys and values in 8: whether they are right, and how fast they are.

The reference is the weights that a checkpoint stands for, in float32, on a CPU, by plain torch. Both read the same
prompts through the real worker, which tells the log-probability of every token: two pieces of each prompt by extends,
the second over what the first has cached, and the rest token by token as decodes (on a GPU by recorded graphs), first
of all prompts and then of one. No rounding can lead one astray, for what comes next is given.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tercet.protocol.values import SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.cuda_graphs import CudaGraphRunner, decode_buckets
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.testing.mxfp4_checkpoints import write_mxfp4
from tercet.scheduler.testing.quantized_checkpoints import Tensors, quantization_config, write_checkpoint
from tools.gpu_stages.executor import SETTLING, decoded
from tools.gpu_stages.kernels import ceilings_of
from tools.gpu_stages.scale import Results, Scale, model_directory
from tools.gpu_stages.worker import PAGE_SIZE, Offline, make_worker

_PROMPTS = 3
_SHARE = 0.02
"""Of the spread of log-probabilities: how far plain weights in 16 bits may be from those in 32, root mean square."""
_TIMES = 1.5
"""How often as far as they are weights in few bits may be: codes are exact in 16 bits, so they round once less."""
_LEAST = 1e-4
"""What sums in another order make of float32."""

_FP8_CACHE = "fp8_e4m3"


@dataclass(frozen=True)
class _Form:
    """How a model is held. `kind` is that of a checkpoint, none for weights in full."""

    kind: str = ""
    cache: str = "auto"
    size: float = 0.0
    """Bytes of a weight, and of its share of scales and zero points as kernels read them."""


_COMPARED = {
    "full": _Form(),
    "fp8 tensor": _Form("tensor"),
    "fp8 channel": _Form("channel"),
    "fp8 block": _Form("deepseek"),
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
"""Of the model that mxfp4 is for: each token goes through all experts, so that rounding chooses no others."""
_TIMED = {
    "full": _Form(),
    "full, fp8 cache": _Form(cache=_FP8_CACHE),
    "fp8": _Form("channel", size=1),
    "fp8 block": _Form("deepseek", size=1 + 4 / 128),
    "int4": _Form("awq", size=0.5 + 8 / 128),
}
"""Of fp8, a scale for a tensor and for an output, and of int4, AWQ and GPTQ, become the same layout."""


def quantised(scale: Scale) -> Iterator[Results]:
    """Each form against its reference, then the time that a token of the large model takes in each."""
    yield from compare(scale)
    yield from time_forms(scale)


def compare(scale: Scale) -> Iterator[Results]:
    """How far each form's log-probabilities are from the reference, and how far they may be."""
    found: dict[str, Results] = {}
    for name, form in _COMPARED.items():
        try:
            with tempfile.TemporaryDirectory() as directory:
                found[name] = _compared(form, Path(directory), scale)
        except Exception as error:
            found[name] = {"trouble": _trouble(error), "right": False}
        yield {"compared": found}
    yield {"wrong": sorted(name for name, result in found.items() if not result["right"])}


def _compared(form: _Form, directory: Path, scale: Scale) -> Results:
    config = scale.compared.config(scale.compared_tokens)
    mine = directory / "model"
    if form.kind == "mxfp4":
        full = write_mxfp4(mine, config | _GPT_OSS)
    else:
        full = write_checkpoint(form.kind or "channel", mine, config, scale.grain, beside=_kv_scales(config))
    reference = replace(scale, device=torch.device("cpu"), dtype=torch.float32)
    uncached = _scored(full, reference, "auto", attention="torch_native")
    plain = _far(_scored(full, scale, "auto"), uncached)
    if form == _Form():
        return _verdict(plain, _SHARE * float(uncached.std()), f"{_SHARE} of the spread of log-probabilities")
    wanted, why = uncached, "what the same weights in full differ by here"
    if form.cache != "auto":
        wanted = _scored(full, reference, form.cache, attention="torch_native")
        why += " and a cache in 8 bits by itself"
    far = _far(_scored(mine if form.kind else full, scale, form.cache), wanted)
    return _verdict(far, _TIMES * (plain + _far(wanted, uncached)) + _LEAST, f"{_TIMES} times {why}")


def _trouble(error: Exception) -> str:
    """What one form raises is its result, and keeps no other from its turn."""
    return f"{type(error).__name__}: {error}"


def _verdict(far: float, allowed: float, why: str) -> Results:
    return {"far": far, "allowed": allowed, "why": why, "right": far <= allowed}


def _far(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference; NaN, which is never within anything, where there is one."""
    return float((given - wanted).square().mean().sqrt())


def _kv_scales(config: dict[str, Any]) -> Tensors:
    """Of every layer's keys and values: none is 1, and no two are alike."""
    names = [(layer, name) for layer in range(config["num_hidden_layers"]) for name in ("k_scale", "v_scale")]
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.011 * (place + 1))
        for place, (layer, name) in enumerate(names)
    }


def _scored(directory: Path, scale: Scale, cache: str, *, attention: str = "auto") -> torch.Tensor:
    """The log-probabilities of all tokens of all prompts but the first, float32 [tokens]."""
    length, vocab = scale.compared_tokens, scale.compared.vocab
    worker = make_worker(
        directory,
        scale,
        slots=_PROMPTS,
        context=length,
        step=_PROMPTS * length,
        attention=attention,
        load_format="safetensors",
        cache=cache,
    )
    found: list[float] = []
    for step, (inits, rows) in enumerate(_steps(length, vocab)):
        pages = [PageUpdate(init.slot, 0, [_pages(init.slot, length)]) for init in inits]
        plan = Plan(step=step, introduce=[*inits], pages=pages, rows=[*rows])
        result = worker.submit(plan).result()
        if rows[0].count > 1:
            _record_graphs(worker)
        for index in sorted(result.prompt_logprobs):
            found += unpack_floats(result.prompt_logprobs[index].chosen)
    worker.close()
    return torch.tensor(found)


def _steps(length: int, vocab: int) -> Iterator[tuple[Sequence[SlotInit], Sequence[Row]]]:
    """Two extends of every prompt, up to its middle, then decodes of all, and of the first alone to its end."""
    inits = [
        SlotInit(
            slot=slot,
            tokens=pack_ints((7919 * slot + 31 * place + place * place) % vocab for place in range(length)),
            prompt_tokens=length,
            choice=0,
            sampling=SamplingParams(max_new_tokens=1),
            top_logprobs=0,
            prompt_logprobs=True,
        )
        for slot in range(_PROMPTS)
    ]
    quarter = length // 4
    for first in (0, quarter):
        yield inits if not first else (), [Row(slot, first, quarter, sample=False) for slot in range(_PROMPTS)]
    for place in range(2 * quarter, length - 1):
        slots = range(_PROMPTS if place < 3 * quarter else 1)
        yield (), [Row(slot, place, 1, sample=False) for slot in slots]


def _pages(slot: int, length: int) -> list[int]:
    each = -(-length // PAGE_SIZE)
    return list(range(slot * each, (slot + 1) * each))


def _record_graphs(worker: TpModelWorker) -> None:
    """All there are; raises RuntimeError where one cannot be recorded, which serving would only log."""
    while worker.prepare():
        pass
    recorded, wanted = worker._graphs, decode_buckets(_PROMPTS)
    if isinstance(recorded, CudaGraphRunner) and len(recorded._graphs) < len(wanted):
        raise RuntimeError(f"of {len(wanted)} graphs only {len(recorded._graphs)} could be recorded: see the log")


def time_forms(scale: Scale) -> Iterator[Results]:
    """Milliseconds a token of all layers of the large model in each form, random weights, beside those in full."""
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    found: dict[str, Results] = {}
    for name, form in _TIMED.items():
        found[name] = {"layers": scale.large.layers}
        try:
            for part in _timed(form, scale, copy):
                found[name] |= part
                yield {"timed": found}
        except Exception as error:
            found[name]["trouble"] = _trouble(error)
            yield {"timed": found}


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
