"""KV events: a subscriber that knows nothing else has the core's radix tree after any run."""

import os
import random
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from packages.scheduler.tests.kv_events.subscriber import Batch, Cleared, Stored, Tree, sglang_hashes
from packages.scheduler.tests.kv_events.subscriber import Path as Prefix
from tercet.protocol.messages.messages import FlushCacheReq
from tercet.protocol.messages.values import LoRAAdapter, Role, unpack_ints
from tercet.protocol.node import PeerReady
from tercet.protocol.testing import Listener, Network
from tercet.scheduler.config import ConfigError, ModelOptions, ProcessOptions, ScheduleOptions
from tercet.scheduler.core.cache.prefix_cache import Node, RadixCache
from tercet.scheduler.core.cache.tree_changes import TreeChange
from tercet.scheduler.kv_events.config import KVEventsConfig, read_kv_events_config
from tercet.scheduler.kv_events.events import BatchEncoder
from tercet.scheduler.kv_events.publisher import KVEventPublisher
from tercet.scheduler.testing import Driver, request, small_capacity
from tercet.scheduler.wiring import SchedulerProcess

PATIENCE = 60.0
ADAPTERS = [None, LoRAAdapter("/adapters/0", "a" * 64), LoRAAdapter("/adapters/1", "b" * 64)]


def paths_of(cache: RadixCache, page_size: int) -> set[Prefix]:
    """Every prefix of whole pages in a core's trees."""
    found: set[Prefix] = set()

    def visit(node: Node, before: tuple[int, ...]) -> None:
        tokens = before + tuple(unpack_ints(node.key))
        adapter, _, salt = node.salt.partition("/")
        found.update((adapter, salt, tokens[:end]) for end in range(len(before), len(tokens) + 1, page_size) if end)
        for child in node.children.values():
            visit(child, tokens)

    for root in cache.roots.values():
        visit(root, ())
    return {path for path in found if path[2]}


@pytest.mark.parametrize("snapshots", [None, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_has_the_tree_of_the_core(seed: int, snapshots: int | None) -> None:
    chance = random.Random(seed)
    driver = Driver(small_capacity(pages=40, adapters=2, snapshots=snapshots), overlap=seed % 2)
    cache = driver.core.memory.cache
    assert isinstance(cache, RadixCache)
    changes: list[TreeChange] = []
    driver.core.memory.observe(changes.append)
    encoder, tree, moves = BatchEncoder(4, 0, lambda: 0.0), Tree(), 0
    tree.apply(encoder.encode(msgspec.msgpack.encode([])))
    prefixes = [[chance.randrange(1, 50) for _ in range(40)] for _ in range(3)]
    for number in range(300):
        if chance.random() < 0.3:
            prompt = [*chance.choice(prefixes)[: chance.randrange(1, 40)], chance.randrange(1, 50)]
            salt = chance.choice(["", "", "s"])
            lora = chance.choice(ADAPTERS[:1] * 3 + ADAPTERS[1:])
            driver.send(request(f"{number}", prompt, salt=salt, lora=lora, max_new_tokens=chance.randrange(1, 20)))
        if chance.random() < 0.02:
            driver.send(FlushCacheReq(id=f"{number}"))
        driver.step()
        if changes:
            moves += len(changes)
            tree.apply(encoder.encode(msgspec.msgpack.encode(changes)))
            changes.clear()
        assert tree.paths == paths_of(cache, 4)
    assert moves > 60
    assert driver.core.memory.evicted, "nothing was evicted, so little was shown"


def test_hashes_are_those_of_sglang() -> None:
    cache, changes = RadixCache(page_size=4), list[TreeChange]()
    cache.observer = changes.append
    tokens = [random.Random(1).randrange(2**31) for _ in range(40)]
    key = array("i", tokens).tobytes()
    cache.insert("/", key[:64], [list(range(4))])
    cache.insert("/", key, [list(range(10))])
    payload = BatchEncoder(4, 3, lambda: 12.5).encode(msgspec.msgpack.encode(changes))
    batch = msgspec.msgpack.decode(payload, type=Batch)
    first, second = batch.events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    expected = sglang_hashes(tokens, 4)
    assert first.block_hashes + second.block_hashes == expected
    assert (first.parent_block_hash, second.parent_block_hash) == (None, expected[3])
    assert first.token_ids + second.token_ids == tokens
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    raw = msgspec.msgpack.decode(payload)
    assert raw[1][0] == {
        "type": "BlockStored",
        "block_hashes": expected[:4],
        "parent_block_hash": None,
        "token_ids": tokens[:16],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


class Subscriber:
    """A subscriber over sockets, which asks for what it missed."""

    def __init__(self, context: Any, endpoint: str, replay_endpoint: str) -> None:
        self.tree, self.next, self.replays = Tree(), 0, 0
        self._sub, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket in (self._sub, self._replay):
            socket.linger, socket.rcvtimeo = 0, round(1000 * PATIENCE)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._replay.connect(replay_endpoint)

    def close(self) -> None:
        self._sub.close()
        self._replay.close()

    def receive(self, wait: float, *, lossy: bool = False) -> bool:
        """Apply the next batch, after those before it; a lossy connection loses it."""
        if not self._sub.poll(1000 * wait):
            return False
        _, number, payload = self._sub.recv_multipart()
        if lossy:
            return True
        if (number := int.from_bytes(number, "big")) > self.next:
            self.catch_up()
        if number == self.next:
            self.tree.apply(payload)
            self.next += 1
        return True

    def catch_up(self) -> None:
        """Ask for all batches from the next one on."""
        self.replays += 1
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while (frames := self._replay.recv_multipart())[2]:
            assert int.from_bytes(frames[1], "big") == self.next
            self.tree.apply(frames[2])
            self.next += 1


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as context:
        yield context


def test_a_subscriber_that_loses_batches_asks_for_them(context: Any, tmp_path: Path) -> None:
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    config = KVEventsConfig(publisher="zmq", endpoint=endpoints[0], replay_endpoint=endpoints[1])
    driver, chance = Driver(small_capacity(pages=40)), random.Random(5)
    publisher = KVEventPublisher(config, 4, 0)
    driver.core.memory.observe(publisher.record)
    subscriber = Subscriber(context, *endpoints)
    try:
        for number in range(60):
            prompt = [chance.randrange(1, 50) for _ in range(chance.randrange(1, 40))]
            driver.send(request(f"{number}", prompt, max_new_tokens=chance.randrange(1, 9)))
            while driver.step():
                publisher.flush()
            publisher.flush()
            subscriber.receive(0.01, lossy=chance.random() < 0.2)
        cache, deadline = driver.core.memory.cache, time.monotonic() + 10
        assert isinstance(cache, RadixCache)
        while subscriber.tree.paths != paths_of(cache, 4):  # the publisher's thread may have the last batch still
            assert time.monotonic() < deadline
            subscriber.catch_up()
        assert subscriber.replays > 1
    finally:
        subscriber.close()
        publisher.close()


def test_a_process_publishes_and_its_successor_begins_with_a_clear_cache(context: Any, tmp_path: Path) -> None:
    config = msgspec.json.encode(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": f"ipc://{tmp_path}/replay",
            "topic": "kv@pod@model",
        }
    ).decode()
    with Network(heartbeat_interval=0.25, silence=10.0) as network:
        frontend = Listener(network.node(Role.FRONTEND))
        command = [sys.executable, "-m", "tercet.scheduler", "--peer=scheduler-0", "--executor=fake"]
        command += [f"--listen=ipc://{network.directory}", f"--kv-events-config={config}", "--data-parallel-rank=1"]
        for start in range(2):
            process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            try:
                frontend.wait_for(PeerReady, "scheduler-0", timeout=PATIENCE)
                subscriber = Subscriber(context, f"ipc://{tmp_path}/events_dp1", f"ipc://{tmp_path}/replay_dp1")
                frontend.node.send("scheduler-0", request(f"{start}", range(1, 100), max_new_tokens=1))
                while not subscriber.receive(0.05):
                    subscriber.catch_up()
                    if subscriber.next > 1:
                        break
                subscriber.catch_up()
                assert ("", "", tuple(range(1, 97))) in subscriber.tree.paths
                subscriber.close()
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("{}", False),
        ('{"publisher": "null"}', False),
        ('{"publisher": "zmq"}', True),
        ('{"enable_kv_cache_events": true}', True),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', False),
        ('{"enable_kv_cache_events": true, "publisher": "zmq", "max_queue_size": 9}', True),
    ],
)
def test_both_switches_turn_events_on(text: str, *, enabled: bool) -> None:
    assert read_kv_events_config(text).enabled is enabled


@pytest.mark.parametrize(("bind", "socket"), [(True, "bound"), (None, "connected")])
def test_the_log_says_what_became_of_an_address(
    bind: bool | None, socket: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    publisher = KVEventPublisher(KVEventsConfig(publisher="zmq", endpoint="tcp://127.0.0.1:0", bind=bind), 4, 0)
    publisher.close()
    assert f"socket={socket}" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected", "binds"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", 2, "tcp://0.0.0.0:5559", True),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558", True),
        ("tcp://indexer:5557", 1, "tcp://indexer:5558", False),
        ("ipc:///run/events", 1, "ipc:///run/events_dp1", True),
    ],
)
def test_ports_grow_with_the_rank(endpoint: str, rank: int, expected: str, *, binds: bool) -> None:
    settings = KVEventsConfig(endpoint=endpoint).settings(rank)
    assert (settings.endpoint, settings.bind) == (expected, binds)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "--kv-events-config"),
        ('{"publisher": "nats"}', "nats"),
        ('{"formats": 1}', "formats"),
        ('{"publisher": "zmq", "endpoint": "inproc://x"}', "endpoint"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://host"}', "replay_endpoint"),
        ('{"publisher": "zmq", "hwm": 0}', "hwm"),
    ],
)
def test_a_wrong_configuration_is_refused_before_the_model_loads(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SchedulerProcess(ProcessOptions(kv_events_config=text), ModelOptions(), ScheduleOptions())


def test_cleared_is_the_first_event() -> None:
    payload = BatchEncoder(4, 0, lambda: 0.0).encode(msgspec.msgpack.encode([]))
    (event,) = msgspec.msgpack.decode(payload, type=Batch).events
    assert isinstance(event, Cleared)
