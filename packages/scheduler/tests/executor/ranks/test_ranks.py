"""A model that two processes share says what one process says, and nothing of them outlives it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from tercet.kernels import device as device_module
from tercet.protocol.messages.values import Grammar, GrammarKind, LogprobParams, SamplingParams, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit, StepResult
from tercet.scheduler.device.cpu_threads import core_share
from tercet.scheduler.executor import kv_budget
from tercet.scheduler.executor.kv_budget import kv_shapes
from tercet.scheduler.executor.ranks.rank_messages import Forced, Order, RankStep
from tercet.scheduler.executor.ranks.ranks import PendingRankStep, Ranks, forced_tokens
from tercet.scheduler.executor.ranks.shared_options import shared_options
from tercet.scheduler.executor.ranks.worker_main import follow
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions, decode_options, encode_options
from tercet.scheduler.models.config.model_config import computed_dtype
from tercet.scheduler.models.layers.shard import Shard, SingleRankCollectives, Split
from tercet.scheduler.models.registry import load_config
from tercet.scheduler.testing import Driver, request
from tercet.scheduler.testing.thread_ranks import on_ranks

PROMPTS = [[17, 42, 99, 7, 260], [5, 9], [*range(1, 60)], [17, 42, 99, 7, 261, 3]]
PHRASE = Grammar(GrammarKind.REGEX, "the quick brown fox( jumps)*! [a-z]{3}")
"""Much of which is forced."""
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5, "n": 2},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "logprobs": LogprobParams()},
    "scored": {"temperature": 0.0, "logprobs": LogprobParams(top=3, prompt=True)},
    "phrase": {"temperature": 1.0, "seed": 3, "grammar": PHRASE, "frequency_penalty": 0.5, "ignore_eos": False},
}


@pytest.fixture
def options(checkpoints: Callable[[str], Path]) -> WorkerOptions:
    return WorkerOptions(model=checkpoints("llama"), device="cpu", slots=8, page_size=8, kv_cache_bytes=1 << 21)


def outputs_of(driver: Driver) -> tuple[Any, ...]:
    """All that requests of every kind are given."""
    for (rid, params), prompt in zip(ASKED.items(), [*PROMPTS, PROMPTS[0]], strict=True):
        driver.send(request(rid, prompt, **{"max_new_tokens": 30, "ignore_eos": True, **params}))
        driver.step()
    driver.run()
    assert not driver.rejected
    return driver.output, driver.finishes, driver.logprobs, driver.prompt_logprobs


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("family", "overlap"), [pytest.param("llama", 0, marks=pytest.mark.slow), ("llama", 1), ("granite_hybrid", 0)]
)
def test_two_processes_say_what_one_says(
    family: str, overlap: int, options: WorkerOptions, place: Path, checkpoints: Callable[[str], Path]
) -> None:
    options = replace(options, model=checkpoints(family), overlap=overlap > 0)
    config = CoreConfig(token_budget=23, draft_rows=8 if family != "llama" else 0)
    alone = TpModelWorker(options)
    expected = outputs_of(Driver(alone.capacity, config, overlap=overlap, executor=alone))
    alone.close()
    ranks = Ranks(options, Split(2))
    (pid,) = ranks.pids
    if family == "llama":
        assert ranks.capacity == alone.capacity
    else:  # half of each state, and so more of them in the same memory
        assert (ranks.capacity.snapshots or 0) > (alone.capacity.snapshots or 0)
    assert not ranks.prepare()
    driver = Driver(ranks.capacity, config, overlap=overlap, executor=ranks)
    output, finishes, logprobs, prompt_logprobs = outputs_of(driver)
    ranks.close()
    assert output == expected[0]
    assert finishes == expected[1]
    assert logprobs == {key: pytest.approx(told, abs=1e-4) for key, told in expected[2].items()}
    assert prompt_logprobs == {key: pytest.approx(told, abs=1e-4, nan_ok=True) for key, told in expected[3].items()}
    assert len(output) == 6
    assert len({token for tokens in output.values() for token in tokens}) > 50
    assert driver.core.counters.forced_tokens > 1
    assert not Path(f"/proc/{pid}").exists()
    assert not [*place.iterdir()]


class NoMoreOrdersError(Exception):
    pass


@pytest.mark.usefixtures("as_before")
def test_a_followers_slots_have_the_tokens_and_counts_of_rank_0(options: WorkerOptions) -> None:
    """Also those that grammars forced, of which it has none: it draws something else, and takes what it is sent."""
    orders: Queue[Order | None] = Queue()
    forced: list[Forced] = []

    def lead(worker: TpModelWorker) -> None:
        class RankExecutor:
            """Rank 0 as `Ranks` runs it."""

            grammars, close, prepare, capacity = worker.grammars, worker.close, worker.prepare, worker.capacity
            adapters, weights, late_masks = worker.adapters, worker.weights, worker.late_masks
            images, audio = worker.images, worker.audio

            def submit(self, plan: Plan) -> Any:
                orders.put(RankStep(plan=plan, forced=[*forced]))
                forced.clear()
                return PendingRankStep(worker.submit(plan), plan, forced)

        driver = Driver(worker.capacity, CoreConfig(token_budget=23), executor=RankExecutor())
        outputs_of(driver)
        orders.put(None)
        assert driver.core.counters.forced_tokens > 1

    def take() -> Order:
        order = orders.get()
        if order is None:
            raise NoMoreOrdersError
        return order

    def run(shard: Shard) -> TpModelWorker:
        worker = TpModelWorker(replace(options, grammar_backend="none" if shard.rank else "llguidance"), shard=shard)
        if shard.rank:
            with pytest.raises(NoMoreOrdersError):
                follow(worker, take)
        else:
            lead(worker)
        return worker

    leader, follower = on_ranks(2, run)
    mine, theirs = (worker._runner for worker in (leader, follower))
    assert torch.equal(mine._tables._tokens, theirs._tables._tokens)
    counts = [runner._sampler._counts for runner in (mine, theirs)]
    for runner in (mine, theirs):
        runner._sampler._count_appended()
    assert counts[0]._row_of == counts[1]._row_of != {}
    assert torch.equal(counts[0].table.output, counts[1].table.output)
    leader.close()


def test_what_is_forced_comes_behind_the_sampled_token() -> None:
    rows = [Row(4, 10, 1, sample=True), Row(2, 0, 7, sample=True)]
    result = StepResult(step=1, token_ids=[3, 5], forced={1: pack_ints([8, 9])})
    assert forced_tokens(Plan(step=1, rows=rows), result) == [Forced(2, 8, pack_ints([8, 9]))]


@pytest.mark.usefixtures("as_before")
def test_a_cpu_and_its_memory_are_divided(options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = shared_options(replace(options, overlap=True), 3, lambda: 7)
    assert [share.threads for share in shares] == [2, 2, 2]
    assert [share.grammar_backend for share in shares] == ["llguidance", "none", "none"]
    assert [share.overlap for share in shares] == [True, False, False]
    assert [share.threads for share in shared_options(replace(options, threads=5), 3)] == [5, 5, 5]
    assert shared_options(options, 3, lambda: 2)[2].threads == 1
    monkeypatch.setattr(kv_budget, "available_bytes", lambda _: 1 << 20)
    pages = []
    for shard in (Shard(), Shard(0, 2)):
        given = replace(options, kv_cache_bytes=None, slots=64, host_ranks=shard.size)
        worker = TpModelWorker(given, shard=shard)
        pages.append(worker.capacity.groups[0].pages)
        worker.close()
    assert pages[1] in (pages[0] // 2, pages[0]), "half of the memory, of which whole heads or half of them take most"


def test_the_fewest_pages_of_any_process_are_those_of_all(options: WorkerOptions) -> None:
    config = load_config(options.model)
    page = sum(shape.page_bytes for shape in kv_shapes(options, config, Shard(0, 2, SingleRankCollectives())).values())

    class Poor(SingleRankCollectives):
        def all_reduce_min(self, number: int) -> int:
            return min(number, 3 * page)

    worker = TpModelWorker(options, shard=Shard(0, 2, Poor()))
    assert [group.pages for group in worker.capacity.groups] == [3]
    worker.close()


@pytest.mark.usefixtures("other_devices")
def test_each_process_takes_a_gpu(options: WorkerOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(device_module, "_compute", lambda _: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [share.device for share in shared_options(replace(options, device="auto"), 2)] == ["cuda:0", "cuda:1"]
    assert [share.device for share in shared_options(options, 2)] == ["cpu", "cpu"]
    assert [share.device for share in shared_options(replace(options, device="auto:1"), 1)] == ["cuda:1"]
    for device, size in (("cuda", 3), ("cuda:1", 2)):
        with pytest.raises(ValueError, match=rf"{size} processes from GPU \d on need as many GPUs: this machine has 2"):
            shared_options(replace(options, device=device), size)


@pytest.mark.usefixtures("other_devices")
def test_all_compute_in_the_dtype_of_the_first_gpu(
    options: WorkerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An A100 and a T4, which alone would take bfloat16 and float16: what they sum has to be alike."""
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}')
    given = replace(options, model=tmp_path, device="auto")
    monkeypatch.setattr(device_module, "_compute", lambda _: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu: (7, 5) if gpu.index else (8, 0))
    for device, dtype in (("auto", "bfloat16"), ("auto:1", "float16")):
        shares = shared_options(replace(given, device=device), 2)
        taken = [computed_dtype(share.model, share.dtype, torch.device(share.device)) for share in shares]
        assert taken == [dtype, dtype]


def test_cores_are_shared_in_runs() -> None:
    cores = [0, 8, 1, 9, 2, 10, 3]
    assert [core_share(cores, rank, 3) for rank in range(3)] == [[0, 8], [1, 9], [2, 10]]
    assert [core_share([4], rank, 2) for rank in range(2)] == [[4], [4]]
    assert core_share([], 1, 2) == []


def test_options_reach_another_process_as_they_are(options: WorkerOptions) -> None:
    given = replace(options, threads=3, mem_fraction_static=0.25, quantization="int8")
    assert decode_options(encode_options(given)) == given


@pytest.mark.usefixtures("as_before")
def test_what_cannot_be_built_leaves_nothing_behind(options: WorkerOptions, place: Path) -> None:
    ended: list[int] = []
    with pytest.raises(ValueError, match="no attention backend 'none'"):
        Ranks(replace(options, attention_backend="none"), Split(2), on_end=lambda _, code, __: ended.append(code))
    assert set(ended) <= {2}, "a follower may have found out, too, and says that it is the options"
    assert not [*place.iterdir()]


def test_a_step_whose_result_is_asked_for_twice_forces_once(options: WorkerOptions) -> None:
    init = SlotInit(
        slot=0,
        tokens=pack_ints(PROMPTS[0]),
        prompt_tokens=5,
        choice=0,
        sampling=SamplingParams(max_new_tokens=9, temperature=0.0, grammar=PHRASE),
    )
    worker = TpModelWorker(options)
    assert worker.grammars is not None
    worker.grammars.get(PHRASE).result()
    plan = Plan(step=0, introduce=[init], pages=[PageUpdate(0, 0, [[1, 3]])], rows=[Row(0, 0, 5, sample=True)])
    forced: list[Forced] = []
    step = PendingRankStep(worker.submit(plan), plan, forced)
    assert step.result() == step.result()
    assert len(forced) == 1
    worker.close()
