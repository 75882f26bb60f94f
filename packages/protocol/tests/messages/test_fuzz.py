"""Damaged golden bytes and random ones, into every decoder and into a node: what is no message is a DecodeError."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.protocol.tests.extents import extents
from packages.protocol.tests.messages.test_golden import golden
from tercet.protocol.config import NodeConfig
from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import Codec, Envelope, decode_envelope, decode_spec, encode_envelope
from tercet.protocol.messages.full_inbox import FullFrontendInbox, FullSchedulerInbox
from tercet.protocol.messages.messages import (
    DecodeSpec,
    DetokenizerInbox,
    Heartbeat,
    Message,
    SupervisorInbox,
)
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node_core import NodeCore
from tercet.protocol.testing import INBOXES, ScriptedClock
from tercet.protocol.transport.channel import Received

GOLDEN = golden()
CODECS = [Codec(inbox) for inbox in (FullFrontendInbox, FullSchedulerInbox, DetokenizerInbox, SupervisorInbox)]
DECODERS: list[Callable[[bytes], object]] = [*(codec.decode for codec in CODECS), decode_envelope, decode_spec]

ODD: list[Any] = [
    *(None, True, False, 0, -1, 2**31, -(2**63), 2**64 - 1, 1.5, math.nan, math.inf, "", "\0", "x" * 1000, b"", b"abc"),
    *([], {}, [[]], {"a": 1}, {1: 2}, ["x"] * 20, list(range(20)), msgspec.msgpack.Ext(1, b"x")),
]
"""Values that no sender puts in these places."""


def deep(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@st.composite
def bent(draw: st.DrawFn) -> bytes:
    """Return a golden message with a few of its values, keys or tags replaced, dropped or moved."""
    tree = msgspec.msgpack.decode(GOLDEN[draw(st.sampled_from(sorted(GOLDEN)))], strict=False)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        if not places:
            break
        node, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["odd", "drop", "copy", "retag", "grow"])):
            case "odd":
                node[key] = copy.deepcopy(ODD[draw(st.integers(0, len(ODD) - 1))])
            case "drop":
                del node[key]
            case "copy":
                other, other_key = places[draw(st.integers(0, len(places) - 1))]
                with contextlib.suppress(KeyError, IndexError):
                    node[key] = other[other_key]
            case "retag":
                tree["type"] = draw(st.sampled_from([*sorted(GOLDEN), "Nothing", "", 7]))
            case "grow":
                tree[draw(st.text(max_size=5))] = copy.deepcopy(ODD[draw(st.integers(0, len(ODD) - 1))])
    try:
        return msgspec.msgpack.encode(tree)
    except (RecursionError, ValueError):  # the container now holds itself
        return deep(10)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Return every (container, key) of a tree."""
    seen: set[int] = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        items = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        for key, value in items:
            yield node, key
            if isinstance(value, dict | list):
                todo.append(value)


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """Return golden bytes with some flipped, cut out, inserted, or followed by others."""
    frame = bytearray(GOLDEN[draw(st.sampled_from(sorted(GOLDEN)))])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["flip", "cut", "insert", "deep", "splice", "length"])):
            case "flip" if at < len(frame):
                frame[at] = draw(st.integers(0, 255))
            case "cut":
                del frame[at : at + draw(st.integers(0, 20))]
            case "insert":
                frame[at:at] = draw(st.binary(max_size=10))
            case "deep":
                frame[at:at] = deep(draw(st.sampled_from([5, 5000])))
            case "splice":
                other = GOLDEN[draw(st.sampled_from(sorted(GOLDEN)))]
                frame[at:] = other[draw(st.integers(0, len(other))) :]
            case "length":
                giant = b"\xff" * 4
                frame[at:at] = draw(st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])) + giant
    return bytes(frame)


FRAMES = st.one_of(bent(), broken(), st.binary(max_size=300))


@extents(200, 2000)
def test_no_decoder_raises_anything_else(extent: settings) -> None:
    @extent
    @given(FRAMES)
    def check(frame: bytes) -> None:
        for decode in DECODERS:
            with contextlib.suppress(DecodeError):
                assert isinstance(decode(frame), Message | Envelope | DecodeSpec)

    check()


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_every_cut_of_a_message_is_refused(name: str) -> None:
    for cut in range(len(GOLDEN[name])):
        for decode in DECODERS:
            with pytest.raises(DecodeError):
                decode(GOLDEN[name][:cut])


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_message_is_read_only_by_the_inboxes_it_is_for(name: str) -> None:
    for codec in CODECS:
        if name in codec.tags:
            assert isinstance(codec.decode(GOLDEN[name]), Message)
        else:
            with pytest.raises(DecodeError):
                codec.decode(GOLDEN[name])


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeCore]:
    """Return a scheduler's core with one frontend up, which the test feeds."""
    directory = tmp_path_factory.mktemp("fuzz") / "run"
    config = NodeConfig(Role.SCHEDULER, "scheduler-0", f"ipc://{directory}", max_peers=8)
    beat = Heartbeat(phase=Phase.IDLE)
    core = NodeCore(config, INBOXES[Role.SCHEDULER], lambda _: beat, clock=ScriptedClock())
    core.open()
    yield core
    core.close("the test is over")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), FRAMES), min_size=1, max_size=4), st.floats(0, 1))
def test_a_node_takes_whatever_comes_and_goes_on(
    core: NodeCore, frames: list[tuple[bool, bytes]], pause: float
) -> None:
    before = core.counters
    for honest, frame in frames:
        envelope = Envelope(source="frontend-0", incarnation="00112233445566ff", target=core.incarnation)
        head = encode_envelope(envelope) if honest else GOLDEN["Envelope"]
        core._receive_one(Received(None, [head, frame]), 1000.0, [])
        core._receive_one(Received(None, [frame, GOLDEN["Hello"]]), 1000.0, [])
    core._clock.advance(pause)  # type: ignore[attr-defined]
    core.tick()
    after = core.counters
    taken = [name for name in after if name == "received" or name.startswith("dropped")]
    assert sum(after[name] - before.get(name, 0) for name in taken) >= 0
    assert len(core.table.links) <= 2 * core.config.max_peers
    assert len(core._open_sockets.counters()) <= 2 * core.config.max_peers
    assert len(core._authorizer) <= 2 * core.config.max_peers
    assert len(core._envelopes) <= 4 * core.config.max_peers
