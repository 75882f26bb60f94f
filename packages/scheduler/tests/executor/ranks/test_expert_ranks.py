"""Mixtures whose experts are on several ranks say what one process says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from packages.scheduler.tests.conftest import make_checkpoint
from packages.scheduler.tests.executor.ranks.test_pipeline import other_hosts
from packages.scheduler.tests.executor.ranks.test_ranks import outputs_of
from tercet.kernels.native.library import missing_library
from tercet.scheduler.config import ConfigError
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.executor.kv_budget import kv_shapes
from tercet.scheduler.executor.ranks.expert_loads import read_loads
from tercet.scheduler.executor.ranks.rank_messages import Forced, Order, RankStep
from tercet.scheduler.executor.ranks.ranks import PendingRankStep, Ranks
from tercet.scheduler.executor.ranks.worker_main import follow
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Shard, Split
from tercet.scheduler.models.registry import load_config
from tercet.scheduler.testing import Driver, request
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
Play = Callable[[Any], Any]
"""Runs requests on an executor."""
NATIVE = pytest.mark.skipif(bool(missing_library()), reason=missing_library())
CONFIG = CoreConfig(token_budget=23, draft_rows=8)


def options_of(model: Path, **more: Any) -> WorkerOptions:
    return WorkerOptions(model=model, device="cpu", slots=8, page_size=8, kv_cache_bytes=1 << 21, **more)


class NoMoreOrdersError(Exception):
    pass


class Leader:
    """Rank 0 as `Ranks` runs it, which sends orders to threads."""

    def __init__(self, worker: TpModelWorker, followers: list[Queue[Order | None]]) -> None:
        self.grammars, self.late_masks, self.adapters = worker.grammars, worker.late_masks, worker.adapters
        self.images, self.audio, self.weights = worker.images, worker.audio, worker.weights
        self.capacity, self.prepare, self.close = worker.capacity, worker.prepare, worker.close
        self._worker, self._followers = worker, followers
        self._forced: list[Forced] = []

    def submit(self, plan: Plan) -> Any:
        for orders in self._followers:
            orders.put(RankStep(plan=plan, forced=[*self._forced]))
        self._forced.clear()
        return PendingRankStep(self._worker.submit(plan), plan, self._forced)


def played_on_threads(options: WorkerOptions, size: int, experts: int, play: Play) -> Any:
    """Return the result of `play` on rank 0 of a model whose experts form groups of ranks."""
    queues: list[Queue[Order | None]] = [Queue() for _ in range(size)]

    def run(shard: Shard) -> Any:
        worker = TpModelWorker(replace(options, grammar_backend="none" if shard.rank else "llguidance"), shard=shard)
        if not shard.rank:
            try:
                return play(Leader(worker, queues[1:]))
            finally:
                for orders in queues[1:]:
                    orders.put(None)

        def take() -> Order:
            order = queues[shard.rank].get()
            if order is None:
                raise NoMoreOrdersError
            return order

        with pytest.raises(NoMoreOrdersError):
            follow(worker, take)
        return worker.close()

    return on_ranks(size, run, experts=experts)[0]


def all_kinds(executor: Any, stages: int = 1) -> Any:
    """Return the outputs of chunked and cached prompts, n = 2, penalties, log-probabilities, a grammar."""
    config = CONFIG if stages == 1 else CoreConfig(token_budget=23, stages=stages)
    driver = Driver(executor.capacity, config, overlap=0 if stages == 1 else stages, executor=executor)
    outputs = outputs_of(driver)
    executor.close()
    assert driver.core.counters.forced_tokens > 1
    return outputs


def check(given: Any, expected: Any, far: float = 1e-4) -> None:
    assert given[:2] == expected[:2]
    for one, other in zip(given[2:], expected[2:], strict=True):
        assert one == {key: pytest.approx(said, abs=far, nan_ok=True) for key, said in other.items()}


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("attention_backend", [pytest.param("cpu", marks=NATIVE), "torch_native"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3_moe"])
def test_two_ranks_say_what_one_process_says(family: str, attention_backend: str, checkpoints: Checkpoints) -> None:
    options = options_of(checkpoints(family), attention_backend=attention_backend)
    check(played_on_threads(options, 2, 2, all_kinds), all_kinds(TpModelWorker(options)))


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("size", "experts"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_processes_say_what_one_process_says(size: int, experts: int, place: Path, tmp_path: Path) -> None:
    model = make_checkpoint("gpt_oss", tmp_path, num_attention_heads=4, num_key_value_heads=4)
    options = options_of(model, expert_parallel_size=experts)
    expected = all_kinds(TpModelWorker(replace(options, expert_parallel_size=1)))
    loads, given = tmp_path / "loads.json", replace(options, overlap=True, expert_loads=((9, 1, 1, 1, 1, 8), (), ()))
    ranks = Ranks(replace(given, redundant_experts=experts), Split(size), load_file=loads)
    pids = ranks.pids
    check(all_kinds(ranks), expected)
    counts = read_loads(loads)
    assert [len(row) for row in counts] == [6, 6, 6]
    assert len({sum(row) for row in counts}) == 1, "each token has as many experts in every layer"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not [*place.glob("tercet-*")]


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("split", "hosts"), [(Split(2), 2), (Split(2, 2), 1), (Split(2, 2), 2)], ids=str)
def test_hosts_and_stages_say_what_one_process_says(
    split: Split, hosts: int, place: Path, checkpoints: Checkpoints
) -> None:
    options = options_of(checkpoints("qwen3_moe"))
    expected = all_kinds(TpModelWorker(options))
    with other_hosts(options.model, hosts, place) as network:
        ranks = Ranks(replace(options, expert_parallel_size=2, overlap=split.stages > 1), split, network=network)
        check(all_kinds(ranks, split.stages), expected)


@pytest.mark.usefixtures("as_before")
def test_retracted_and_cached_choices_go_on(checkpoints: Checkpoints) -> None:
    """Memory for a third of the tokens: choices are retracted, and prompts find cached prefixes."""
    options = options_of(checkpoints("qwen3_moe"))
    shapes = kv_shapes(options, load_config(options.model), Shard(0, 2))
    little = 24 * sum(shape.page_bytes for shape in shapes.values())

    def play(executor: Any) -> tuple[Any, Any]:
        driver = Driver(executor.capacity, CONFIG, executor=executor)
        for number in range(10):
            prompt = [*range(1, 40), number]
            driver.send(request(f"r{number}", prompt, max_new_tokens=40, temperature=0.0, ignore_eos=True))
            for _ in range(3):
                driver.step()
        driver.run()
        executor.close()
        return driver.output, driver.core.counters

    expected, _ = play(TpModelWorker(options))
    given, counters = played_on_threads(replace(options, kv_cache_bytes=little), 2, 2, play)
    assert given == expected
    assert counters.retractions
    assert counters.cached_tokens


@pytest.mark.parametrize("text", ["{}", '{"logical_count": [1]}', '{"logical_count": [[-1]]}', "["])
def test_files_of_no_loads_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--init-expert-location .*loads\.json: "):
        read_loads(tmp_path / "loads.json")


def test_experts_of_a_model_without_any_are_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValueError, match="--expert-parallel-size 2: LlamaForCausalLM has no experts"):
        on_ranks(2, lambda shard: TpModelWorker(options_of(checkpoints("llama")), shard=shard), experts=2)
