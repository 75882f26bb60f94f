"""LoRA adapters: correctness and cost.

The reference is a checkpoint into whose weights an adapter was merged, in float32, on a CPU, in plain torch. One worker
with two adapters computes prompts with the first, the second and none in the same steps, and returns the
log-probabilities of given tokens (`given_tokens`); each prompt must match its own reference.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tercet.kernels.ops.lora import LoRAWeights
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.models.layers.lora import LayerAdapter, LoRABank
from tercet.scheduler.testing.lora_checkpoints import ALL_LINEAR, write_adapter
from tercet.scheduler.testing.quantized_checkpoints import write_checkpoint
from tools.gpu_stages import executor
from tools.gpu_stages.given_tokens import (
    LEAST,
    SHARE,
    CountedReplays,
    Prompts,
    count_replays,
    far_from,
    record_graphs,
    scored,
    verdict,
    wrong_of,
)
from tools.gpu_stages.kernels import ceilings_of
from tools.gpu_stages.processes import NOT_RUN, Failed, each, gathered
from tools.gpu_stages.scale import Results, Scale, model_directory
from tools.gpu_stages.worker import NOBODY, Offline

_TIMES = 3.0
"""Allowed error of steps with adapters, as a multiple of that without: they round more often, between kernels that
are one without adapters, and the adapters' products add more.
"""


@dataclass(frozen=True)
class _Adapter:
    """An adapter to write."""

    rank: int
    modules: str


_ADAPTERS = {
    "first": _Adapter(16, ALL_LINEAR),
    "second": _Adapter(6, r".*\.self_attn\.[qv]_proj"),
}
"""The second has a rank that no tile has, and only some of the projections that are computed as one."""
_PLACES = {NOBODY: "none"} | dict(enumerate(_ADAPTERS))
_PROMPTS = Prompts(
    places=[0, NOBODY, 1, 1, 0],
    decoded=[range(5), [4, 1, 2], [1]],
    rank=max(adapter.rank for adapter in _ADAPTERS.values()),
)
"""Decodes fill a graph, are padded in one, and finally have only a row without adapter."""

_TIMED_ADAPTERS, _TIMED_RANK = 8, 16
_WHO = {"nobody": 0, "one for all": 1, "eight": _TIMED_ADAPTERS}
"""Number of adapters among the rows of a step."""
_TURNS = 3


def compare(scale: Scale) -> Iterator[Results]:
    """Yield the distance of log-probabilities with each adapter and none from the reference, and the allowed one."""
    found: dict[str, Results] = {name: {"trouble": NOT_RUN} for name in ("unused", *_PLACES.values())}
    for _, part in each(_compare, [scale], min(1, scale.processes)):
        found |= {"all": {"trouble": part.trouble}} if isinstance(part, Failed) else part
        yield {"compared": found, "wrong": wrong_of(found)}


def _compare(scale: Scale) -> Iterator[dict[str, Results]]:
    with tempfile.TemporaryDirectory() as directory:
        for name, result in _compared(Path(directory), scale):
            yield {name: result}


def _compared(directory: Path, scale: Scale) -> Iterator[tuple[str, Results]]:
    config = scale.compared.config(scale.compared_tokens)
    full = write_checkpoint("channel", directory / "model", config, scale.grain)
    given = {name: _written(directory / name, full, name, scale.compared.hidden) for name in _ADAPTERS}
    plain = replace(_PROMPTS, places=[NOBODY] * len(_PROMPTS.places), rank=1)
    reference = replace(scale, device=torch.device("cpu"), dtype=torch.float32)
    without = scored(full, reference, plain, attention="torch_native")
    roomy = replace(_PROMPTS, adapters=list(given.values()))
    unused = torch.cat(scored(full, scale, replace(roomy, places=plain.places)))
    here, spread = far_from(unused, torch.cat(without)), float(torch.cat(without).std())
    yield "unused", verdict(here, SHARE * spread, f"{SHARE} of the spread of log-probabilities")
    mine = scored(full, scale, roomy)
    for place, name in _PLACES.items():
        wanted = without
        if place != NOBODY:
            merged = _merged(directory / f"{name}-merged", full, given[name])
            wanted = scored(merged, reference, plain, attention="torch_native")
        slots = [slot for slot, its in enumerate(_PROMPTS.places) if its == place]
        far, moved = (
            far_from(torch.cat([some[slot] for slot in slots]), torch.cat([wanted[slot] for slot in slots]))
            for some in (mine, without)
        )
        result = verdict(far, _TIMES * here + LEAST, f"{_TIMES} times what steps without adapters differ by here")
        yield name, {**result, "moved": moved}


def _written(directory: Path, model: Path, name: str, hidden: int) -> Path:
    """Write the files of an adapter that changes layers of any width by about as much."""
    own, seed = _ADAPTERS[name], list(_ADAPTERS).index(name)
    size = 0.15 * (64 / hidden) ** 0.25
    return write_adapter(directory, model, rank=own.rank, r=own.rank, modules=own.modules, seed=seed, size=size)


def _merged(directory: Path, model: Path, adapter: Path) -> Path:
    """Write a full checkpoint into whose weights an adapter was merged as PEFT defines it."""
    directory.mkdir()
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs = load_file(adapter / "adapter_model.safetensors")
    ends = ".lora_A.weight"
    scale = config["lora_alpha"] / config["r"]
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    (stored,) = model.glob("*.safetensors")
    tensors = load_file(stored)
    for key in [key for key in pairs if key.endswith(ends)]:
        path = key.removesuffix(ends)
        name = path.removeprefix("base_model.model.") + ".weight"
        tensors[name] = tensors[name].float() + scale * pairs[f"{path}.lora_B.weight"] @ pairs[key]
    save_file(tensors, directory / stored.name)
    return directory


def time_adapters(scale: Scale) -> Iterator[Results]:
    """Yield the large model's milliseconds per token and prompt tokens per second, by the number of adapters."""
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    yield from gathered(partial(_time, scale, copy), ["timed"], min(1, scale.processes))


def _time(scale: Scale, copy: float, _: str) -> Iterator[Results]:
    yield {"rank": _TIMED_RANK}
    yield from _timed(scale, copy)


def _timed(scale: Scale, copy: float) -> Iterator[Results]:
    """Yield medians of alternating turns, so that each arrangement meets the same machine."""
    batches = sorted({min(scale.batches), min(max(scale.batches), 32)})
    slots, decodes, cached = max(batches), scale.decodes + executor.SETTLING, scale.large.cached * scale.dtype.itemsize
    with model_directory(scale.large, scale.context + decodes + 64) as directory:
        offline = Offline(
            directory,
            scale,
            slots=slots,
            prompt=scale.context,
            decodes=decodes,
            loras=_TIMED_ADAPTERS,
            rank=_TIMED_RANK,
        )
        each = _install(offline.worker)
        offline.prefill(0, scale.context, 0)
        record_graphs(offline.worker, slots, adapted=True)
        graphs = count_replays(offline.worker)
        seconds: dict[str, list[float]] = {}
        steps: dict[str, dict[str, list[dict[str, float]]]] = {}
        for who, many in [*_WHO.items()] * _TURNS:
            places = [slot % many if many else NOBODY for slot in range(slots)]
            prefills = [offline.prefill(slot, scale.context, place) for slot, place in enumerate(places)]
            seconds.setdefault(who, []).append(statistics.median(prefills))
            for batch in batches:
                read = scale.large.weights * scale.dtype.itemsize + min(many, batch) * each
                before = _replayed(graphs, many)
                turn = executor.decoded(offline, scale, batch, copy, weights=read, cached=cached)
                if graphs is not None and _replayed(graphs, many) - before < decodes:
                    raise RuntimeError(f"decodes of {batch} with adapters for {who} were not replayed from graphs")
                steps.setdefault(f"batch {batch}", {}).setdefault(who, []).append(turn)
            speeds = {who: scale.context / statistics.median(turns) for who, turns in seconds.items()}
            yield {"prefill_tokens_per_s": speeds, **{batch: _medians(turns) for batch, turns in steps.items()}}
        offline.worker.close()


def _replayed(graphs: CountedReplays | None, many: int) -> int:
    """Return the number of steps replayed so far, with adapters if `many` is not 0."""
    if graphs is None:
        return 0
    return graphs.adapted if many else graphs.plain


def _medians(turns: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each figure of each arrangement."""
    return {who: {key: statistics.median(one[key] for one in its) for key in its[0]} for who, its in turns.items()}


def _install(worker: TpModelWorker) -> int:
    """Load random adapters into all slots, too small to overflow a random model; return the bytes of each."""
    bank = _bank(worker)
    places = len(bank.ranks)
    for place in range(places):
        bank.install(place, {path: _random(weights) for path, weights in bank.weights.items()}, _TIMED_RANK)
    return bank.bytes // places


def _bank(worker: TpModelWorker) -> LoRABank:
    if worker._runner._adapters is None:
        raise RuntimeError("the worker has no adapters")
    return worker._runner._adapters._bank


def _random(weights: LoRAWeights) -> LayerAdapter:
    a, b = weights.a, weights.b
    parts = len(weights.parts)
    return LayerAdapter(
        torch.randn(parts, a.shape[1] // parts, a.shape[2], dtype=a.dtype, device=a.device) * 0.01,
        torch.randn(b.shape[1:], dtype=b.dtype, device=b.device) * 0.01,
    )
