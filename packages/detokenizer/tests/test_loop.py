"""Main loop on a fake node."""

import hashlib
import threading
from collections.abc import Callable

import msgspec
import pytest

from packages.detokenizer.tests.batches import batch
from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.loop import MIN_DRAIN_SECONDS, RETRY_SECONDS, TOKENIZER_TIMEOUT_SECONDS, DetokenizerLoop
from tercet.detokenizer.status import StatusBoard
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import (
    AbortReq,
    BatchStrOutput,
    Message,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import FinishReason, FinishType, Phase, Role, pack_ints, unpack_ints
from tercet.protocol.node import Delivery, PeerDown, PeerUp
from tercet.protocol.testing import FakeNode, ScriptedClock

DONE = FinishReason(FinishType.LENGTH)


class Bench:
    """Loop with a fake node and a scripted clock."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_backlog: int = 3,
        node: FakeNode | None = None,
        clock: ScriptedClock | None = None,
    ) -> None:
        self.file = vocabulary.tokenizer.to_str().encode()
        self.node, self.clock, self.tokenizers = node or FakeNode(), clock or ScriptedClock(), TokenizerStore()
        self.manager = DetokenizerManager(self.tokenizers)
        self.board = StatusBoard(self.manager, self.clock)
        self.loop = DetokenizerLoop(self.node, self.manager, self.tokenizers, self.board, self.clock, max_backlog)

    def feed(self, source: str, message: Message | PeerUp | PeerDown, *frames: bytes) -> None:
        self.node.feed(Delivery(source, message, tuple(memoryview(frame) for frame in frames)))
        self.loop.turn(0)

    def files(self, names: list[str], contents: bytes, sha256: str = "") -> None:
        sha256 = sha256 or hashlib.sha256(contents).hexdigest()
        self.feed("s", TokenizerFiles(id="x", model="m", names=names, sha256=[sha256] * len(names)), contents)

    def begin(self) -> None:
        self.feed("f", PeerUp("f", Role.FRONTEND, "1"))
        self.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
        self.files(["tokenizer.json"], self.file)
        self.node.take()


def texts(node: FakeNode) -> list[list[str]]:
    return [message.texts for _, message, _ in node.take() if isinstance(message, BatchStrOutput)]


def test_a_scheduler_is_asked_for_its_tokenizer_and_then_the_part_is_ready(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    [(peer, request, _)] = bench.node.take()
    assert (peer, type(request)) == ("s", TokenizerFilesReq)
    assert (bench.node.ready, bench.board.heartbeat("x").phase) == (None, Phase.LOADING)
    bench.files(["tokenizer.json"], bench.file)
    assert (bench.node.ready is not None, bench.board.heartbeat("x").phase) == (True, Phase.IDLE)
    bench.feed("f", PeerUp("f", Role.FRONTEND, "1"))
    assert bench.node.take() == []


def test_a_scheduler_that_does_not_answer_is_asked_again(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.node.full = {"s"}
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    bench.node.full = set()
    bench.loop.turn(0)
    assert len(bench.node.take()) == 1
    bench.clock.advance(TOKENIZER_TIMEOUT_SECONDS - 0.1)
    bench.loop.turn(0)
    assert bench.node.take() == []
    bench.clock.advance(0.1)
    bench.loop.turn(0)
    assert len(bench.node.take()) == 1


@pytest.mark.parametrize(
    ("names", "contents", "sha256", "complaint"),
    [
        (["config.json"], b"{}", "", "has no tokenizer.json"),
        (["tokenizer.json"], b"{}", "0" * 64, "does not have the SHA-256"),
        (["tokenizer.json"], b"{}", "", "not a tokenizer.json"),
        (["tokenizer.json"], b"\xff", "", "not UTF-8"),
        (["tokenizer.json", "config.json"], b"{}", "", "2 names"),
    ],
)
def test_bad_files_are_logged_once_and_the_part_stays_unready(
    byte_level: Vocabulary,
    caplog: pytest.LogCaptureFixture,
    names: list[str],
    contents: bytes,
    sha256: str,
    complaint: str,
) -> None:
    bench = Bench(byte_level)
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    bench.files(names, contents, sha256)
    bench.files(names, contents, sha256)
    assert [complaint in record.message for record in caplog.records] == [True]
    assert bench.node.ready is None


def test_tokens_that_come_before_their_tokenizer_wait_for_it(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    ids = byte_level.tokenizer.encode("the dog").ids
    bench.feed("f", PeerUp("f", Role.FRONTEND, "1"))
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    bench.feed("s", batch(ids[:1]))
    bench.feed("s", batch(ids[1:], 1))
    assert texts(bench.node) == []
    bench.files(["tokenizer.json"], bench.file)
    assert "".join(text for [text] in texts(bench.node)) == "the dog"


def test_tokens_whose_tokenizer_cannot_be_read_end_in_an_error(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.feed("f", PeerUp("f", Role.FRONTEND, "1"))
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    bench.feed("s", batch([1]))
    bench.node.take()
    bench.files(["tokenizer.json"], b"{}")
    [(_, message, _)] = bench.node.take()
    assert isinstance(message, BatchStrOutput)
    assert message.finishes[0].type is FinishType.ERROR


def test_pending_tokens_of_a_dead_scheduler_are_dropped(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    bench.feed("s", batch(byte_level.tokenizer.encode("a").ids))
    bench.feed("s", PeerDown("s", Role.SCHEDULER, "silence"))
    bench.begin()
    assert (texts(bench.node), len(bench.manager)) == ([], 0)


def test_tokens_become_text_for_their_frontend(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.feed("s", batch(byte_level.tokenizer.encode("the dog").ids))
    [(peer, message, _)] = bench.node.take()
    assert isinstance(message, BatchStrOutput)
    assert (peer, message.texts) == ("f", ["the dog"])


def test_a_full_frontend_gets_its_messages_later_and_in_order(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    ids = byte_level.tokenizer.encode("abcd").ids
    bench.node.full = {"f"}
    bench.feed("s", batch(ids[:1]))
    bench.feed("s", batch(ids[1:2], 1))
    bench.node.full = set()
    bench.feed("s", batch(ids[2:], 2))
    assert "".join(text for [text] in texts(bench.node)) == "abcd"


def test_a_frontend_that_stays_full_loses_its_oldest_messages(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level, max_backlog=3)
    bench.begin()
    bench.node.full = {"f"}
    [a] = byte_level.tokenizer.encode("a").ids
    for position in range(5):
        bench.feed("s", batch([a], position))
    assert bench.manager.counters["dropped_backlog"] == 2
    bench.node.full = set()
    bench.loop.turn(0)
    kept = [message for _, message, _ in bench.node.take() if isinstance(message, BatchStrOutput)]
    assert [unpack_ints(message.positions)[0] for message in kept] == [2, 3, 4]


def test_a_peer_that_goes_takes_its_choices_and_its_backlog_with_it(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    [a] = byte_level.tokenizer.encode("a").ids
    bench.node.full = {"f"}
    bench.feed("s", batch([a]))
    assert bench.board.heartbeat("f").held.rids == ["r"]
    bench.feed("f", PeerDown("f", Role.FRONTEND, "silence"))
    bench.node.full = set()
    bench.loop.turn(0)
    assert (texts(bench.node), bench.board.heartbeat("f").held.rids) == ([], [])


def test_what_comes_for_a_frontend_that_is_gone_is_kept_no_longer(byte_level: Vocabulary) -> None:
    """The scheduler may learn later that the frontend is down, and says nothing more of it, not even an end."""
    bench = Bench(byte_level)
    bench.begin()
    first, second = (byte_level.tokenizer.encode(letter).ids for letter in "ab")
    bench.feed("s", batch(first))
    bench.feed("f", PeerDown("f", Role.FRONTEND, "silence"))
    bench.node.take()
    bench.node.full = {"f"}
    bench.feed("s", batch(first))
    bench.feed("s", batch(second, 1))
    assert (texts(bench.node), len(bench.manager), bench.loop.seconds_until_due()) == ([], 0, None)


def test_an_abort_drops_only_the_choice_of_its_frontend(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.feed("s", batch(byte_level.tokenizer.encode("a").ids))
    for source, abort in (("g", AbortReq(rid="r", indices=[0])), ("f", AbortReq(rid="r", indices=[1]))):
        bench.feed(source, abort)
        assert bench.board.heartbeat("f").held.rids == ["r"]
    bench.feed("f", AbortReq(rid="r", indices=[0]))
    assert (bench.board.heartbeat("f").held.rids, bench.manager.counters["aborted"]) == ([], 1)


def test_an_abort_repeated_in_one_message_counts_once(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.feed("s", batch(byte_level.tokenizer.encode("a").ids))
    bench.feed("f", AbortReq(rid="r", indices=[0, 0, 5]))
    assert (len(bench.manager), bench.manager.counters["aborted"]) == (0, 1)


def test_a_request_called_off_as_a_whole_loses_every_choice(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    for index in range(3):
        bench.feed(
            "s", msgspec.structs.replace(batch(byte_level.tokenizer.encode("a").ids), indices=pack_ints([index]))
        )
    assert len(bench.manager) == 3
    bench.feed("f", AbortReq(rid="other"))
    assert len(bench.manager) == 3
    bench.feed("f", AbortReq(rid="r"))
    assert len(bench.manager) == 0


def test_the_loop_wakes_by_itself_to_ask_again(byte_level: Vocabulary) -> None:
    """Heartbeats do not wake the loop, so that no other message may come."""
    bench = Bench(byte_level)
    bench.node.full = {"s"}
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    assert bench.loop.seconds_until_due() == RETRY_SECONDS, "it could not be asked at all"
    bench.node.full = set()
    bench.loop.turn(0)
    bench.clock.advance(1.0)
    assert bench.loop.seconds_until_due() == TOKENIZER_TIMEOUT_SECONDS - 1.0
    bench.begin()
    assert bench.loop.seconds_until_due() is None


def test_the_loop_waits_for_ever_when_idle_and_briefly_with_a_backlog(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.loop.stop()
    assert bench.node.woken == 1
    bench.node.waits.clear()
    bench.node.feed(Delivery("s", batch(byte_level.tokenizer.encode("a").ids, finish=DONE)))
    bench.loop.run(drain_grace=5, min_drain=0)
    assert bench.node.waits == [RETRY_SECONDS] * 2
    assert texts(bench.node) == [["a"]]
    assert bench.board.heartbeat("f").phase is Phase.DRAINING


class Rounds(FakeNode):
    """Loop whose rounds take a second each; `script` has the events of each round."""

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__()
        self._clock = clock
        self.script: dict[int, Callable[[], object]] = {}

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        self._clock.advance(1)
        self.script.pop(len(self.waits), lambda: None)()
        return super().drain(wait)


@pytest.fixture
def slow(byte_level: Vocabulary) -> tuple[Bench, Rounds]:
    """Return a bench whose rounds take a second."""
    clock = ScriptedClock()
    node = Rounds(clock)
    bench = Bench(byte_level, node=node, clock=clock)
    bench.begin()
    return bench, node


@pytest.mark.parametrize(("rounds", "sent"), [(3, [["a"]]), (30, [])])
def test_a_backlog_may_leave_after_stop_but_not_for_ever(
    slow: tuple[Bench, Rounds], byte_level: Vocabulary, rounds: int, sent: list[list[str]]
) -> None:
    bench, node = slow
    node.full = {"f"}
    bench.feed("s", batch(byte_level.tokenizer.encode("a").ids, finish=DONE))
    node.waits.clear()
    node.script[rounds] = node.full.clear
    bench.loop.stop()
    bench.loop.run(drain_grace=10)
    assert texts(node) == sent
    assert len(node.waits) <= 10


def test_choices_held_are_finished_after_stop(slow: tuple[Bench, Rounds], byte_level: Vocabulary) -> None:
    bench, node = slow
    ids = byte_level.tokenizer.encode("abcd").ids
    bench.feed("s", batch(ids[:1]))
    node.waits.clear()
    node.script[2] = lambda: node.feed(Delivery("s", batch(ids[1:2], 1)))
    node.script[5] = lambda: node.feed(Delivery("s", batch(ids[2:], 2, DONE)))
    bench.loop.stop()
    bench.loop.run(drain_grace=100)
    assert "".join(text for [text] in texts(node)) == "abcd"
    assert len(node.waits) == 7


def test_drain_ends_after_the_grace_or_a_second_stop(slow: tuple[Bench, Rounds], byte_level: Vocabulary) -> None:
    bench, node = slow
    bench.feed("s", batch(byte_level.tokenizer.encode("a").ids))
    node.waits.clear()
    bench.loop.stop()
    bench.loop.run(drain_grace=10)
    assert len(node.waits) == 10
    node.waits.clear()
    bench.loop.stop()
    bench.loop.run(drain_grace=10)
    assert node.waits == []


def test_a_process_that_leaves_waits_until_linked_frontends_know_it(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.feed("f", PeerUp("f", Role.FRONTEND, "1"))
    bench.loop.stop()
    ran = threading.Thread(target=bench.loop.run, args=(60,))
    ran.start()
    bench.clock.advance(MIN_DRAIN_SECONDS - 0.01)
    ran.join(0.05)
    assert ran.is_alive()
    bench.clock.advance(0.01)
    ran.join(30)
    assert not ran.is_alive()


def test_a_tokenizer_that_comes_late_does_not_undo_draining(byte_level: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "1"))
    bench.loop.stop()
    bench.loop.run(drain_grace=1)
    bench.files(["tokenizer.json"], bench.file)
    assert bench.board.heartbeat("f").phase is Phase.DRAINING


def test_a_scheduler_that_returns_with_another_model_brings_its_tokenizer(
    byte_level: Vocabulary, llama: Vocabulary
) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.feed("s", PeerDown("s", Role.SCHEDULER, "silence"))
    bench.feed("s", PeerUp("s", Role.SCHEDULER, "2"))
    bench.files(["tokenizer.json"], llama.tokenizer.to_str().encode())
    bench.node.take()
    bench.feed("s", batch(llama.tokenizer.encode("the dog", add_special_tokens=False).ids))
    assert (texts(bench.node), len(bench.tokenizers)) == ([["the dog"]], 1)


def test_a_scheduler_that_is_gone_leaves_no_default_behind(byte_level: Vocabulary, llama: Vocabulary) -> None:
    bench = Bench(byte_level)
    bench.begin()
    bench.feed("s", PeerDown("s", Role.SCHEDULER, "silence"))
    bench.feed("t", PeerUp("t", Role.SCHEDULER, "1"))
    contents = llama.tokenizer.to_str().encode()
    sha256 = hashlib.sha256(contents).hexdigest()
    bench.feed("t", TokenizerFiles(id="x", model="m", names=["tokenizer.json"], sha256=[sha256]), contents)
    assert len(bench.tokenizers) == 1
