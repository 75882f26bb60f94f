"""Cost of LoRA adapters of rank 16 on every layer of a native CPU model: alternating steps with and without them.

The model has random weights in the shape of Qwen2.5-0.5B, bfloat16. A decode is measured with no adapter, with one for
all rows, and with a different one per row; a prompt of 512 tokens with none and with one.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from benchmarks.micro.cpu import MODELS
from tercet.protocol.messages.values import LoRAAdapter, SamplingParams, pack_ints
from tercet.scheduler.core.places.loads import AdapterLoad
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.lora.adapter_files import Adapter
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.lora import LayerAdapter, LoRABank

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

RANK, SLOTS = 16, 8
PROMPT, LONG, ROUNDS, STEPS = 64, 512, 5, 8
PAGES = 40


def random_adapter(bank: LoRABank, seed: int) -> Adapter:
    """Return a small random adapter for every layer."""
    generator = torch.Generator().manual_seed(seed)

    def layer(path: str) -> LayerAdapter:
        weights = bank.weights[path]
        a = torch.randn(len(weights.parts), RANK, weights.a.shape[2], generator=generator) * 0.01
        return LayerAdapter(a, torch.randn(RANK, weights.b.shape[2], generator=generator) * 0.01)

    return Adapter(f"{seed:064x}", RANK, {path: layer(path) for path in bank.weights})


class Bench:
    """Worker with random adapters."""

    def __init__(self, directory: Path) -> None:
        options = WorkerOptions(
            model=directory,
            device="cpu",
            load_format="dummy",
            slots=SLOTS,
            context_length=PAGES * 16,
            kv_cache_bytes=1 << 28,
            grammar_backend="none",
            max_loras=SLOTS,
            max_lora_rank=RANK,
        )
        self.worker = TpModelWorker(options)
        adapters = self.worker._runner._adapters
        assert adapters is not None
        bank = adapters._bank
        adapters.loader._load = lambda adapter: random_adapter(bank, int(adapter.path))
        self._loads = [AdapterLoad(place, LoRAAdapter(str(place))) for place in range(SLOTS)]
        self._step = 0

    def prefill(self, slot: int, tokens: int, place: int) -> float:
        """Return the seconds of a prompt with the adapter at `place`, or without one for -1."""
        init = SlotInit(
            slot=slot,
            tokens=pack_ints((7 * slot + 13 * at) % 1000 for at in range(tokens)),
            prompt_tokens=tokens,
            choice=0,
            sampling=SamplingParams(max_new_tokens=1 << 20, temperature=0.0),
            adapter=place,
        )
        pages = PageUpdate(slot, 0, [[slot * PAGES + page for page in range(PAGES)]])
        return self._run([Row(slot, 0, tokens, sample=True)], [init], [pages])

    def decode(self, rows: int, places: list[int]) -> float:
        """Return the median seconds of a decode step."""
        for slot in range(rows):
            self.prefill(slot, PROMPT, places[slot])
        return median(
            self._run([Row(slot, PROMPT + step, 1, sample=True) for slot in range(rows)]) for step in range(STEPS)
        )

    def _run(
        self, rows: list[Row], inits: list[SlotInit] | None = None, pages: list[PageUpdate] | None = None
    ) -> float:
        loads, self._loads = self._loads, []
        plan = Plan(step=self._step, adapters=loads, introduce=inits or [], pages=pages or [], rows=rows)
        self._step += 1
        start = time.perf_counter()
        self.worker.submit(plan).result()
        return time.perf_counter() - start


def rows() -> Iterator[Measured]:
    """Yield each figure, and its ratio to the same without adapters."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODELS["qwen-0.5b"]))
        bench = Bench(Path(name))
        bench.prefill(0, PROMPT, 0)  # loads the adapters into their slots
        decodes = {"none": [-1] * SLOTS, "one": [0] * SLOTS, "another each": list(range(SLOTS))}
        for count in (1, SLOTS):
            kinds = list(decodes)[: 2 if count == 1 else 3]
            took = [{kind: bench.decode(count, decodes[kind]) for kind in kinds} for _ in range(ROUNDS)]
            yield from told(f"decode, {count} rows", took)
        prompts = [{kind: bench.prefill(0, LONG, decodes[kind][0]) for kind in ("none", "one")} for _ in range(ROUNDS)]
        yield from told(f"prompt of {LONG}", prompts)
        bench.worker.close()


def told(what: str, rounds: list[dict[str, float]]) -> Iterator[Measured]:
    """Yield medians in milliseconds, and medians of the ratios within each round."""
    for kind in rounds[0]:
        yield f"{what}, adapters: {kind}", 1e3 * median(each[kind] for each in rounds), "ms", None
    for kind in [kind for kind in rounds[0] if kind != "none"]:
        yield f"{what}, adapters: {kind} over none", median(each[kind] / each["none"] for each in rounds), "times", None
