"""A model in pipeline stages, which are processes, says what one process says."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from packages.scheduler.tests.executor.ranks.test_ranks import PHRASE, outputs_of
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Plan, Row, SlotInit, StepResult
from tercet.scheduler.executor.ranks.host_network import HostNetwork
from tercet.scheduler.executor.ranks.rank_messages import Forced, without_sampling
from tercet.scheduler.executor.ranks.ranks import Ranks, sampled_tokens
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.testing import Driver, request

CASES = [
    pytest.param(Split(1, 2), 1),
    *(
        pytest.param(split, hosts, marks=pytest.mark.slow)
        for split, hosts in ((Split(2, 2), 1), (Split(1, 4), 1), (Split(2), 2), (Split(1, 2), 2), (Split(2, 2), 2))
    ),
]
"""Splits, and numbers of hosts."""


@pytest.fixture(scope="module")
def model(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of four layers, with the tokenizer of the others."""
    directory = tmp_path_factory.mktemp("deep")
    sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 4, "vocab_size": 389}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 0}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    for file in checkpoints("llama").glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.fixture
def options(model: Path) -> WorkerOptions:
    return WorkerOptions(model=model, device="cpu", slots=8, page_size=8, kv_cache_bytes=1 << 20)


@contextmanager
def other_hosts(model: Path, hosts: int, place: Path) -> Iterator[HostNetwork | None]:
    """Run the processes of the other hosts, on loopback; yield the network of host 0."""
    if hosts == 1:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tercet.scheduler", "--model", str(model), "--device", "cpu", "--threads", "1"]
    command += ["--dist-init-addr", address, "--insecure-loopback", "--listen", f"ipc://{place}"]
    others = [subprocess.Popen([*command, "--node-rank", str(host)]) for host in range(1, hosts)]
    try:
        yield HostNetwork(hosts=hosts, address=f"tcp://{address}", timeout=60)
    finally:
        for each in others:
            each.terminate()
            assert each.wait(20) == 0


@pytest.mark.usefixtures("as_before")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("split", "hosts"), CASES, ids=str)
def test_stages_say_what_one_process_says(split: Split, hosts: int, options: WorkerOptions, place: Path) -> None:
    """Chunked prompts, n = 2, penalties, log-probabilities of prompts, and a grammar that forces tokens."""
    alone = TpModelWorker(options)
    expected = outputs_of(Driver(alone.capacity, CoreConfig(token_budget=23), executor=alone))
    alone.close()
    with other_hosts(options.model, hosts, place) as network:
        ranks = Ranks(replace(options, overlap=True), split, network=network)
        config = CoreConfig(token_budget=23, stages=split.stages)
        driver = Driver(ranks.capacity, config, overlap=split.stages, executor=ranks)
        output, finishes, logprobs, prompt_logprobs = outputs_of(driver)
        ranks.close()
    assert output == expected[0]
    assert finishes == expected[1]
    assert logprobs == {key: pytest.approx(given, abs=1e-4) for key, given in expected[2].items()}
    assert prompt_logprobs == {key: pytest.approx(given, abs=1e-4, nan_ok=True) for key, given in expected[3].items()}
    assert driver.core.counters.forced_tokens > 1
    assert not [*place.iterdir()]


@pytest.mark.slow
@pytest.mark.usefixtures("as_before", "place")
def test_retracted_and_cached_choices_go_on(options: WorkerOptions) -> None:
    """Memory for a third of the tokens: choices are retracted, and prompts find cached prefixes."""

    def run(executor: Ranks | TpModelWorker, stages: int) -> tuple[dict[tuple[str, int], list[int]], int, int]:
        driver = Driver(
            executor.capacity, CoreConfig(token_budget=40, stages=stages), overlap=stages, executor=executor
        )
        prompt = [*range(1, 40)]
        for number in range(10):
            driver.send(request(f"r{number}", [*prompt, number], max_new_tokens=60, temperature=0.0, ignore_eos=True))
            for _ in range(3):
                driver.step()
        driver.run()
        executor.close()
        return driver.output, driver.core.counters.retractions, driver.core.counters.cached_tokens

    alone = TpModelWorker(options)
    expected, *_ = run(alone, 1)
    page = 2 * 2 * 12 * 4 * 8 * 2  # keys and values of one stage
    given, retractions, cached = run(Ranks(replace(options, overlap=True, kv_cache_bytes=40 * page), Split(1, 2)), 2)
    assert given == expected
    assert retractions
    assert cached > 39


def test_a_rank_without_a_head_neither_samples_nor_scores() -> None:
    init = SlotInit(
        slot=1,
        tokens=pack_ints([1, 2]),
        prompt_tokens=2,
        choice=0,
        sampling=SamplingParams(max_new_tokens=2, grammar=PHRASE),
        prompt_logprobs=True,
    )
    plan = Plan(step=3, introduce=[init], rows=[Row(1, 0, 2, sample=True), Row(0, 4, 1, sample=False)])
    stripped = without_sampling(plan)
    assert [row.sample for row in stripped.rows] == [False, False]
    assert [(row.slot, row.start, row.count) for row in stripped.rows] == [(1, 0, 2), (0, 4, 1)]
    assert not stripped.introduce[0].prompt_logprobs
    assert stripped.introduce[0].tokens == init.tokens


def test_sampled_tokens_come_behind_the_row() -> None:
    rows = [Row(4, 10, 1, sample=True), Row(2, 0, 7, sample=False), Row(3, 5, 1, sample=True)]
    result = StepResult(step=1, token_ids=[3, -1, -1])
    assert sampled_tokens(Plan(step=1, rows=rows), result) == [Forced(4, 11, pack_ints([3]))]
