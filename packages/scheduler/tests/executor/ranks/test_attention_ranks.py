"""Ranks that have requests of their own, and experts of all, say what one process says."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from packages.scheduler.tests.conftest import make_checkpoint
from packages.scheduler.tests.executor.ranks.test_expert_ranks import NATIVE, Leader, NoMoreOrdersError, check
from packages.scheduler.tests.executor.ranks.test_pipeline import other_hosts
from packages.scheduler.tests.executor.ranks.test_ranks import outputs_of
from tercet.protocol.messages.messages import ReleaseMemoryReq, ResumeMemoryReq
from tercet.protocol.messages.values import LoRAAdapter, MemoryTag
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.kv_budget import kv_shapes
from tercet.scheduler.executor.ranks.rank_messages import Order
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.ranks.worker_main import follow
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import WHOLE, Shard, Split
from tercet.scheduler.models.registry import load_config
from tercet.scheduler.testing import Driver, request
from tercet.scheduler.testing.attention_ranks import RanksDriver
from tercet.scheduler.testing.lora_checkpoints import write_adapter
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
Play = Callable[[Any, int], Any]
"""Runs requests on an executor of so many attention ranks."""


def options_of(model: Path, **more: Any) -> WorkerOptions:
    return WorkerOptions(model=model, device="cpu", slots=8, page_size=8, kv_cache_bytes=1 << 21, **more)


def ranked(options: WorkerOptions, size: int) -> WorkerOptions:
    return replace(options, attention_ranks=size, expert_parallel_size=size)


def driver_of(executor: Any, ranks: int, overlap: int = 0) -> Driver:
    config = CoreConfig(token_budget=23, draft_rows=0 if overlap else 8, attention_ranks=ranks)
    if ranks == 1:
        return Driver(executor.capacity, config, overlap=overlap, executor=executor)
    return RanksDriver(executor.capacity, config, overlap=overlap, executor=executor)


def played_alone(options: WorkerOptions, play: Play) -> Any:
    return play(TpModelWorker(options), 1)


def played_on_threads(options: WorkerOptions, size: int, play: Play) -> Any:
    """Return the result of `play` on rank 0 of several attention ranks."""
    options = ranked(options, size)
    queues: list[Queue[Order | None]] = [Queue() for _ in range(size)]

    def run(shard: Shard) -> Any:
        rank = shard.attention.rank
        worker = TpModelWorker(replace(options, grammar_backend="none" if rank else "llguidance"), shard=shard)
        if not rank:
            try:
                return play(Leader(worker, queues[1:]), size)
            finally:
                for orders in queues[1:]:
                    orders.put(None)

        def take() -> Order:
            order = queues[rank].get()
            if order is None:
                raise NoMoreOrdersError
            return order

        with pytest.raises(NoMoreOrdersError):
            follow(worker, take)
        return worker.close()

    return on_ranks(size, run, attention=True)[0]


def adapter_of(directory: Path) -> LoRAAdapter:
    """Return an adapter with the hash of its files."""
    parts = [directory / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    digests = b"".join(hashlib.sha256(part.read_bytes()).digest() for part in parts)
    return LoRAAdapter(str(directory), hashlib.sha256(digests).hexdigest())


def all_kinds(executor: Any, ranks: int, overlap: int = 0) -> Any:
    """Return the outputs of chunked and cached prompts, n = 2, penalties, log-probabilities, a grammar."""
    driver = driver_of(executor, ranks, overlap)
    outputs = outputs_of(driver)
    executor.close()
    if isinstance(driver, RanksDriver):
        assert {slot // executor.capacity.slots for slot in driver.slots} == {*range(ranks)}
        driver.assert_empty()
    return outputs


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("attention_backend", [pytest.param("cpu", marks=NATIVE), "torch_native"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3_moe", "qwen3_5_moe"])
def test_two_ranks_say_what_one_process_says(family: str, attention_backend: str, checkpoints: Checkpoints) -> None:
    options = options_of(checkpoints(family), attention_backend=attention_backend)
    far = 1e-3 if family == "qwen3_5_moe" else 1e-4  # other chunks of a recurrent state
    check(played_on_threads(options, 2, all_kinds), played_alone(options, all_kinds), far)


@pytest.mark.usefixtures("as_before")
def test_retracted_and_cached_choices_go_on(checkpoints: Checkpoints) -> None:
    """Memory for a third of the tokens: choices are retracted, and prompts find cached prefixes."""
    options = options_of(checkpoints("qwen3_moe"))
    shapes = kv_shapes(options, load_config(options.model), WHOLE)
    little = 24 * sum(shape.page_bytes for shape in shapes.values())

    def play(executor: Any, ranks: int) -> tuple[Any, Any]:
        driver = driver_of(executor, ranks)
        for number in range(14):
            prompt = [*range(1, 40), number]
            driver.send(request(f"r{number}", prompt, max_new_tokens=60, temperature=0.0, ignore_eos=True))
            for _ in range(3):
                driver.step()
        driver.run()
        executor.close()
        cores = driver.whole.cores if isinstance(driver, RanksDriver) else [driver.core]
        return driver.output, [core.counters for core in cores]

    expected, _ = played_alone(options, play)
    given, counters = played_on_threads(replace(options, kv_cache_bytes=little), 2, play)
    assert given == expected
    assert all(each.retractions and each.cached_tokens for each in counters)


@pytest.mark.usefixtures("as_before")
def test_each_rank_runs_the_adapters_of_its_requests(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """There are two places for three adapters on each rank; memory is released and resumed in between."""
    options = replace(options_of(checkpoints("qwen3_moe")), max_loras=2, max_lora_rank=4)
    attention = r".*layers\.\d+\.self_attn\.\w_proj"
    files = [write_adapter(tmp_path / f"{seed}", options.model, modules=attention, seed=seed) for seed in range(3)]
    adapters = [None, *map(adapter_of, files)]

    def play(executor: Any, ranks: int) -> Any:
        driver = driver_of(executor, ranks)
        for number in range(12):
            prompt = [17, 42, number]
            adapter = adapters[number % 4]
            driver.send(
                request(f"r{number}", prompt, max_new_tokens=20, temperature=0.0, ignore_eos=True, lora=adapter)
            )
            if number == 6:
                tags = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
                driver.send(ReleaseMemoryReq(id="off", tags=tags), ResumeMemoryReq(id="on", tags=tags))
            driver.step()
        driver.run()
        executor.close()
        return driver.output, {load.rank for plan in driver.plans for load in plan.adapters}

    expected, one = played_alone(options, play)
    given, both = played_on_threads(options, 2, play)
    assert given == expected
    assert len({tuple(tokens) for tokens in given.values()}) == 12
    assert (one, both) == ({0}, {0, 1})


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("overlap", [0, 1])
def test_processes_say_what_one_process_says(overlap: int, place: Path, tmp_path: Path) -> None:
    model = make_checkpoint("gpt_oss", tmp_path, num_attention_heads=4, num_key_value_heads=4)
    options = options_of(model)
    expected = played_alone(options, all_kinds)
    ranks = Ranks(replace(ranked(options, 2), overlap=overlap > 0), Split(2))
    pids = ranks.pids
    assert ranks.capacity.slots == 4
    check(all_kinds(ranks, 2, overlap), expected)
    assert len(pids) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not [*place.glob("tercet-*")]


@pytest.mark.slow
@pytest.mark.usefixtures("as_before")
@pytest.mark.timeout(300)
def test_ranks_on_two_hosts_say_what_one_process_says(place: Path, checkpoints: Checkpoints) -> None:
    options = options_of(checkpoints("qwen3_moe"))
    expected = played_alone(options, all_kinds)
    with other_hosts(options.model, 2, place) as network:
        check(all_kinds(Ranks(ranked(options, 2), Split(2), network=network), 2), expected)


def test_slots_are_divided_evenly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="slots must be a multiple of attention_ranks"):
        WorkerOptions(model=tmp_path, slots=7, attention_ranks=2)
