from typing import Any

import pytest
import torch

from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops import sampler_ops
from tercet.scheduler.executor.graphs.warmup import (
    compile_mask_kernels,
    measured_kv_bytes,
    one_page_runner,
    ordinary_plans,
    profile_run,
    worst_plan,
)
from tercet.scheduler.executor.kv_pool import KVShape
from tercet.scheduler.executor.model_runner import ModelRunner


class Device:
    """Memory in bytes, of which an allocator keeps what a step once took."""

    def __init__(self, free: int, step: int, error: Exception | None = None) -> None:
        self.free = free
        self.step = step
        self.error = error or torch.OutOfMemoryError()

    def run(self) -> None:
        if self.step > self.free:
            raise self.error
        self.free -= self.step


def test_what_the_worst_step_takes_is_not_given_to_the_cache() -> None:
    device = Device(free=1000, step=300)
    assert measured_kv_bytes(lambda: device.free, device.run, 0.9, 512) == 630


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("Triton Error [CUDA]: out of memory")])
def test_no_memory_for_the_worst_step_is_said_before_serving(error: Exception) -> None:
    device = Device(free=100, step=300, error=error)
    with pytest.raises(ValueError, match="no memory for a step of 512 tokens"):
        measured_kv_bytes(lambda: device.free, device.run, 0.9, 512)


def test_a_rehearsal_that_fails_otherwise_says_so_itself() -> None:
    device = Device(free=100, step=300, error=RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        measured_kv_bytes(lambda: device.free, device.run, 0.9, 512)


def test_the_worst_plan_fills_the_step_and_every_slot() -> None:
    plan = worst_plan(slots=5, tokens=64, context_length=100)
    assert [row.count for row in plan.rows] == [1, 1, 1, 1, 60]
    assert all(row.sample for row in plan.rows)
    assert [row.count for row in worst_plan(slots=3, tokens=64, context_length=16).rows] == [16, 16, 16]
    assert [row.count for row in worst_plan(slots=3, tokens=20, context_length=16).rows] == [1, 3, 16]
    assert [row.count for row in worst_plan(slots=3, tokens=2, context_length=16).rows] == [1, 1, 1]
    assert [row.count for row in worst_plan(slots=9, tokens=4, context_length=16).rows] == [1] * 9


def rehearsed(model: Any, ops: Any) -> None:
    runner = one_page_runner(
        model,
        TorchNativeAttention,
        ops,
        {0: KVShape(page_size=4, kv_heads=1, head_dim=4, dtype=torch.float32)},
        slots=3,
        context_length=30,
        vocab_size=50,
        device=torch.device("cpu"),
    )
    profile_run(runner, worst_plan(3, 20, 30), None, None)


def test_it_runs_on_a_model(attending: Any) -> None:
    rehearsed(attending, sampler_ops)
    assert attending.calls == [20]


@pytest.mark.parametrize("chained", [False, True])
def test_ordinary_steps_run_and_are_of_every_usual_kind(chained: bool, attending: Any, steps: Any) -> None:
    runner = ModelRunner(
        attending,
        steps().pool,
        TorchNativeAttention,
        slots=3,
        context_length=40,
        vocab_size=50,
        device=torch.device("cpu"),
    )
    plans = [*ordinary_plans(3, 30, 40, chained=chained, adapted=False)]
    for plan in plans:
        assert min(runner.execute(plan).result().token_ids) >= 0
    kinds = {(init.sampling.temperature, init.sampling.top_p) for plan in plans for init in plan.introduce}
    assert kinds == {(0.0, 1.0), (1.0, 1.0), (1.0, 0.9)}
    assert {init.top_logprobs for plan in plans for init in plan.introduce} == {-1, 5, 20}
    assert max(attending.calls) == 30
    assert {len(plan.rows) for plan in plans} == {1, 2, 3}
    assert any(plan.draft_tokens for plan in plans) == chained


def test_ordinary_steps_have_decodes_of_texts_of_all_sizes_beside_prompts() -> None:
    """Whose keys are cut up in as many ways."""
    plans = [*ordinary_plans(2, 512, 1000, chained=False, adapted=False)]
    mixed = [plan.rows[0].start + 1 for plan in plans if {row.count for row in plan.rows} == {1, 2}]
    assert mixed == [100, 200, 400, 800]
    alone = [*ordinary_plans(1, 512, 1000, chained=False, adapted=False)]
    assert {len(plan.rows) for plan in alone} == {1}


def test_adapters_are_tried_where_there_may_be_some_and_nobody_keeps_one() -> None:
    def last(adapted: bool) -> list[int]:
        plans = ordinary_plans(2, 64, 100, chained=False, adapted=adapted)
        return [init.adapter for plan in plans for init in plan.introduce if init.slot == 0]

    assert max(last(adapted=False)) == -1
    assert max(last(adapted=True)) == 0
    assert last(adapted=True)[-1] == -1


def test_no_ordinary_step_is_longer_than_the_context_or_a_step() -> None:
    assert [*ordinary_plans(4, 64, 2, chained=True, adapted=True)] == []
    for tokens, context, longest in ((64, 9, 7), (5, 500, 5), (1, 500, 1)):
        plans = [*ordinary_plans(4, tokens, context, chained=True, adapted=False)]
        assert max(row.start + row.count for plan in plans for row in plan.rows) <= context
        assert max(row.count for plan in plans for row in plan.rows) == longest


def test_masks_are_tried_on_logits_of_each_dtype_that_there_will_be() -> None:
    logits: list[torch.Tensor] = []

    class Masking:
        def apply_bitmask_(self, given: torch.Tensor, mask: torch.Tensor) -> None:
            assert mask.shape == (1, 2)
            logits.append(given)

    ops: Any = Masking()
    compile_mask_kernels(ops, 50, torch.bfloat16, torch.device("cpu"))
    assert [(each.dtype, each.shape) for each in logits] == [(torch.bfloat16, (1, 50)), (torch.float32, (1, 50))]


class Cramped:
    """Room for one row less than sample at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sampler_ops, name)

    def sample(self, logits: torch.Tensor, *given: Any) -> torch.Tensor:
        if len(logits) > 2:
            raise torch.OutOfMemoryError
        return sampler_ops.sample(logits, *given)


def test_the_worst_step_is_not_computed_in_parts(attending: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        rehearsed(attending, Cramped())
