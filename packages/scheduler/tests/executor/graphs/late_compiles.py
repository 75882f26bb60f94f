"""Which kernels serving has compiled that a start did not, as a program: `late_compiles.py MODEL PLACES`.

A model runs as on a GPU, with graphs, but nothing is launched: what would be compiled is noted, and results are zeros.
Some choices have adapters if there are places for any. It says how many kernels a start has compiled, and the name of
each that comes later.
"""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from triton.backends.compiler import GPUTarget

from tercet.kernels.attention import triton, triton_latent, triton_plan
from tercet.kernels.tools import compiling
from tercet.kernels.triton.precompile import CompileTarget
from tercet.kernels.triton.sampling import sampler_ops
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.staging import Array, HostToDevice, pack_into, starts, unpack
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.graphs.warmup import ordinary_plans
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.lora.adapters import StepAdapters
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.models.layers.layer_ops import TritonLayerOps, set_ops
from tercet.scheduler.models.layers.lora import LoRABank
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import dummy_weights

CPU = torch.device("cpu")
SLOTS, STEP, CONTEXT, STEPS = 40, 1500, 6000, 120
DRAWN = SamplingParams(max_new_tokens=1, temperature=1.0)
KINDS = [
    (SamplingParams(max_new_tokens=1, temperature=0.0), -1),
    (SamplingParams(max_new_tokens=1, temperature=0.0), 3),
    (DRAWN, -1),
    (SamplingParams(max_new_tokens=1, temperature=1.0, top_p=0.9), 0),
    (SamplingParams(max_new_tokens=1, temperature=1.0, top_k=20, min_p=0.1), -1),
    (SamplingParams(max_new_tokens=1, temperature=1.0, top_k=20, frequency_penalty=0.5), 20),
    (SamplingParams(max_new_tokens=1, temperature=0.0, logit_bias={3: 1.0}), -1),
]
"""How choices are sampled, and how many log-probabilities they want."""


class Recorder:
    """Only computes what it is to record."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return (lambda: None), run()


def runner_of(directory: Path, places: int) -> ModelRunner:
    config = load_config(directory, "bfloat16")
    model = build_model(config, CPU)
    dummy_weights(model, quantization=config.quantization)
    set_ops(model, TritonLayerOps())
    adapters = None
    if places:
        bank = LoRABank(model, places, 16, torch.bfloat16, CPU)
        bank.attach(model)
        adapters = StepAdapters(bank, SLOTS, CPU, sort=True)
    rank = 0 if config.latent is None else config.latent.rank
    backend: Any = triton_latent.TritonLatent if rank else triton.TritonAttention
    shape = KVShape(page_size=16, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=torch.bfloat16, rank=rank)
    pool = KVPool([KVGroup(name="full", layers=dict.fromkeys(range(config.layers), shape), pages=1)], CPU, spare=True)
    runner = ModelRunner(
        model,
        pool,
        backend,
        slots=SLOTS,
        context_length=CONTEXT,
        vocab_size=config.vocab_size,
        device=CPU,
        sampling_ops=sampler_ops,
        adapters=adapters,
    )
    for plan in ordinary_plans(SLOTS, STEP, CONTEXT, chained=False, adapted=adapters is not None):
        runner.execute(plan).result()
    runner.graphs = CudaGraphRunner(model, pool, [backend], Recorder(), runner._tables, runner._sampler, adapters)
    return runner


def plans(places: int) -> Iterator[Plan]:
    """Decodes, prompts beside them, whole or in pieces or behind what is cached, and sometimes many at once."""
    chance = random.Random(5)
    lengths: dict[int, int] = {}
    for step in range(STEPS):
        lengths = {slot: length for slot, length in lengths.items() if length < CONTEXT and chance.random() < 0.95}
        rows, inits, room = [Row(slot, length, 1, sample=True) for slot, length in lengths.items()], [], STEP
        for slot in [slot for slot in range(SLOTS) if slot not in lengths][: chance.choice([0, 0, 1, 2, SLOTS])]:
            start, count = chance.choice([0, 0, 160, 3000]), min(room, chance.choice([1, 3, 17, 100, 260, 700]))
            if not count:
                break
            sampling, top = chance.choice(KINDS[:: 1 if step > STEPS // 2 else 2])
            known, room = start + count, room - count
            text = pack_ints([0] * known)
            init = SlotInit(slot=slot, tokens=text, prompt_tokens=known, choice=0, sampling=sampling, top_logprobs=top)
            inits.append(msgspec.structs.replace(init, adapter=chance.randrange(-1, places)))
            rows.append(Row(slot, start, count, sample=True))
        rows.sort(key=lambda row: row.count > 1)
        lengths = {row.slot: row.start + row.count for row in rows}
        if rows:
            yield Plan(step=step, introduce=inits, rows=rows)


def send(_: HostToDevice, arrays: list[Array]) -> list[torch.Tensor]:
    """As to a GPU: in one buffer."""
    staged = torch.empty(starts(arrays)[-1], dtype=torch.uint8)
    pack_into(staged, arrays)
    return unpack(staged, arrays)


def main(directory: Path, places: int) -> None:
    compiled: dict[tuple[str, ...], None] = {}

    def note(fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002 - so Triton calls it
        key = fn.jit_function.fn.__name__, *(str(compile[part]) for part in ("signature", "configs", "constants"))
        compiled[key] = None
        return True

    with compiling._launches_go_to(note, CompileTarget(GPUTarget("cuda", 90, 32))), torch.inference_mode():
        runner = runner_of(directory, places)
        known = len(compiled)
        for plan in plans(places):
            runner.execute(plan).result()
            assert runner.graphs is not None
            runner.graphs.capture_next()
    sys.stdout.write(" ".join([str(known), *(name for name, *_ in [*compiled][known:])]))


if __name__ == "__main__":
    empty = torch.empty
    torch.empty = lambda *size, **how: empty(*size, **how).zero_()
    torch.empty_like = torch.zeros_like
    vars(triton_plan)["multiprocessors"] = lambda _: 132
    HostToDevice.send = send  # type: ignore[assignment]
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
