"""The embedding core as a script: inputs in, plans out, vectors out."""

import math
import random

import pytest

from packages.scheduler.tests.core.embedding.embedding_run import CAPACITY, POISON, Run
from tercet.protocol.messages.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    ContinueGenerationReq,
    ExclusiveReady,
    FlushCacheReq,
    PauseGenerationReq,
    ReleaseMemoryReq,
    TokenizedEmbeddingReqInput,
)
from tercet.protocol.messages.values import FinishReason, FinishType, MemoryTag, unpack_floats, unpack_ints
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.embedding.inputs import TextInputs
from tercet.scheduler.core.embedding.plan import EncoderCapacity, EncodeResult
from tercet.scheduler.core.embedding.scheduler import EmbeddingScheduler
from tercet.scheduler.core.events import Arrival, CoreMessage, Drain, PeerBlocked, PeerDrained, PeerGone
from tercet.scheduler.testing import FakeEncoder, embedding_request, request


def ids(first: int, count: int) -> list[int]:
    return [first] * count


def test_inputs_share_a_step_up_to_its_budget_and_each_gets_its_own_vector() -> None:
    run = Run()
    run.send(*(embedding_request(str(n), ids(n, n), types=[0] * (n - 1) + [1]) for n in range(1, 6)))
    assert run.run() == [[ids(1, 1), ids(2, 2), ids(3, 3)], [ids(4, 4)], [ids(5, 5)]]
    for n in range(1, 6):
        row = next(row for plan in run.plans for row in plan.rows if len(row.input_ids) == 4 * n)
        assert run.vectors["f0", str(n), 0] == pytest.approx(run.encoder.vector(row))
    assert run.core.empty
    assert run.core.load().prompt_tokens == 15


def test_each_input_tells_how_long_it_waited() -> None:
    core, encoder = (
        EmbeddingScheduler(CoreConfig(token_budget=8), TextInputs(CAPACITY)),
        FakeEncoder(CAPACITY, poison=POISON),
    )
    sent = [("a", 8, 10.0), ("b", 8, 10.5), ("c", 1, 11.0)]
    core.handle(*(Arrival("f0", embedding_request(rid, ids(1, count)), at) for rid, count, at in sent))
    [(_, aborted, *_)] = core.handle(Arrival("f0", AbortReq(rid="c"), 11.5))
    assert isinstance(aborted, BatchEmbeddingOutput)
    assert math.isnan(unpack_floats(aborted.queue_times)[0]), "no step had it"
    told: dict[str, float] = {}
    for now in (12.0, 13.0):
        plan = core.schedule(now)
        assert plan is not None
        [(_, batch, *_)] = core.commit(encoder.submit(plan).result())
        assert isinstance(batch, BatchEmbeddingOutput)
        told.update(zip(batch.rids, unpack_floats(batch.queue_times), strict=True))
    assert told == {"a": 2.0, "b": 2.5}


def test_an_input_longer_than_the_budget_is_computed_whole_and_by_itself() -> None:
    run = Run()
    run.send(embedding_request("a", ids(1, 2)), embedding_request("b", ids(2, 20)), embedding_request("c", ids(3, 1)))
    assert run.run() == [[ids(1, 2)], [ids(2, 20)], [ids(3, 1)]]


def test_vectors_go_to_whoever_asked_also_under_one_rid() -> None:
    run = Run()
    run.send(embedding_request("a", [1]), source="f0")
    run.send(embedding_request("a", [2]), source="f1")
    run.run()
    assert run.vectors["f0", "a", 0] != run.vectors["f1", "a", 0]


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("context_length_exceeded", embedding_request("x", ids(1, 21))),
        ("invalid_token_ids", embedding_request("x", [])),
        ("invalid_token_ids", embedding_request("x", [50])),
        ("invalid_token_ids", embedding_request("x", [-1])),
        ("invalid_request", embedding_request("x", [1, 2], types=[0])),
        ("invalid_request", embedding_request("x", [1], types=[2])),
        ("invalid_request", embedding_request("x", [1], attempt=-1)),
        ("invalid_request", embedding_request("x" * 513, [1])),
        ("invalid_request", request("x", [1])),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_a_reason(code: str, wrong: CoreMessage) -> None:
    run = Run()
    run.send(wrong, embedding_request("y", [1]))
    [refusal] = run.rejected.values()
    assert (refusal.code, refusal.retry) == (code, False)
    assert run.run() == [[[1]]]


def test_types_mean_nothing_to_a_model_with_one() -> None:
    run = Run(EncoderCapacity(context_length=20, vocab_size=50, token_types=1, width=3))
    run.send(embedding_request("a", [1, 2], types=[0, 1]))
    run.run()
    assert [row.token_types for plan in run.plans for row in plan.rows] == [b""]


def test_the_queue_is_bounded_but_not_for_what_comes_back_after_a_crash() -> None:
    run = Run(max_queued=2)
    run.send(*(embedding_request(str(n), [n]) for n in range(3)))
    assert (run.rejected["2"].code, run.rejected["2"].retry) == ("overloaded", True)
    run.send(embedding_request("back", [9], attempt=1))
    assert run.run() == [[[9], [0], [1]]]


def test_a_higher_attempt_takes_over_and_a_lower_one_is_ignored() -> None:
    run = Run()
    run.send(embedding_request("a", [1]), embedding_request("b", [2]))
    run.send(embedding_request("a", [1], attempt=2), embedding_request("a", [1], attempt=1))
    assert run.run() == [[[1], [2]]]
    assert run.vectors.keys() == {("f0", "a", 2), ("f0", "b", 0)}
    assert run.core.counters.ignored == 1


def test_an_attempt_that_comes_while_the_step_runs_gets_that_step_s_vector() -> None:
    run = Run()
    run.send(embedding_request("a", [1]))
    run.plan()
    run.send(embedding_request("a", [1], attempt=1))
    run.commit()
    assert run.vectors.keys() == {("f0", "a", 1)}
    assert run.plan() is None


def test_an_attempt_with_another_input_is_computed_anew() -> None:
    run = Run()
    run.send(embedding_request("a", [1]))
    run.plan()
    run.send(embedding_request("a", [2], attempt=1))
    run.commit()
    assert run.vectors == {}
    assert run.run() == [[[2]]]
    assert run.vectors.keys() == {("f0", "a", 1)}


def test_aborts_end_what_waits_and_what_is_in_flight() -> None:
    run = Run()
    run.send(embedding_request("a", ids(1, 8)), embedding_request("b", [2]), embedding_request("c", [3]))
    run.plan()
    run.send(AbortReq(rid="a", reason="left"), AbortReq(rid="b"), AbortReq(rid="c", indices=[1]), AbortReq(rid="no"))
    run.commit()
    assert run.run() == [[[3]]]
    assert run.finishes["f0", "a", 0] == FinishReason(FinishType.ABORT, message="left")
    assert run.vectors.keys() == {("f0", "c", 0)}


def test_a_user_abort_ends_all_inputs_of_its_http_request() -> None:
    run = Run()
    run.send(*(embedding_request(rid, [1]) for rid in ("r.0", "r.1", "rest", "s")))
    run.send(AbortReq(rid="r"), source="f1")
    assert not run.finishes
    run.send(AbortReq(rid="r", user_requested=True), source="f1")
    assert run.finishes.keys() == {("f0", "r.0", 0), ("f0", "r.1", 0)}
    assert all(finish.user_requested for finish in run.finishes.values())
    run.send(embedding_request("r.2", [1]))
    assert run.finishes["f0", "r.2", 0].user_requested, "it comes too late"
    run.send(AbortReq(rid="", user_requested=True), source="f1")
    assert len(run.finishes) == 5
    assert run.plan() is None
    assert run.core.empty


def test_numbers_that_are_not_finite_end_their_input_only() -> None:
    run = Run()
    run.send(embedding_request("bad", [POISON]), embedding_request("good", [1]))
    run.run()
    assert run.finishes["f0", "bad", 0].type is FinishType.ERROR
    assert run.vectors.keys() == {("f0", "good", 0)}


def test_an_input_out_of_memory_fails_alone_with_its_code() -> None:
    run = Run(room=18, token_budget=40)
    run.send(embedding_request("large", ids(2, 19)), embedding_request("good", ids(1, 18)))
    assert len(run.run()) == 1
    assert run.vectors.keys() == {("f0", "good", 0)}
    finish = run.finishes["f0", "large", 0]
    assert (finish.type, finish.code) == (FinishType.ERROR, "context_length_exceeded")
    assert "19 tokens" in finish.message
    assert run.core.empty


def test_an_input_that_must_run_alone_does() -> None:
    run = Run()
    run.send(embedding_request("a", [1]))
    assert run.plan() == [[1]]
    run.send(embedding_request("killer", [2], attempt=2, alone=True), embedding_request("b", [3]))
    assert run.plan() is None  # another step is in flight
    run.commit()
    assert run.plan() == [[2]]
    assert run.plan() is None  # it is in flight
    run.commit()
    assert run.plan() == [[3]]


def test_an_exclusive_input_starts_after_its_frontend_was_notified() -> None:
    run = Run()
    run.send(embedding_request("a", [1]))
    assert run.plan() == [[1]]
    run.send(embedding_request("killer", [2], attempt=2, alone=True, hold=True), embedding_request("b", [3]))
    run.send(embedding_request("other", [4], attempt=2, alone=True, hold=True), source="f1")
    assert run.plan() is None
    assert run.offers == []
    run.commit()
    assert run.offers == [ExclusiveReady(rid="killer", attempt=2)]
    run.send(embedding_request("eager", [5], attempt=1, priority=9))
    assert run.plan() is None
    run.send(embedding_request("killer", [2], attempt=3, alone=True))
    assert run.plan() == [[2]]
    run.commit()
    assert run.offers[1:] == [ExclusiveReady(rid="other", attempt=2)]
    assert run.run() == []
    run.send(PeerGone("f1"))
    assert run.run() == [[[5], [3]]]
    assert run.core.empty


def test_an_exclusive_input_of_a_full_frontend_blocks_no_others() -> None:
    run = Run()
    run.send(embedding_request("killer", [2], attempt=2, alone=True, hold=True))
    run.send(PeerBlocked("f0"), embedding_request("killer", [2], attempt=3, alone=True))
    run.send(embedding_request("b", [3]), source="f1")
    assert run.run() == [[[3]]]
    run.send(PeerDrained("f0"))
    assert run.run() == [[[2]]]


def test_a_full_frontend_stops_its_own_inputs_only() -> None:
    run = Run()
    run.send(embedding_request("a", [1]), PeerBlocked("f0"))
    run.send(embedding_request("b", [2]), source="f1")
    assert run.run() == [[[2]]]
    assert not run.core.runnable
    run.send(PeerDrained("f0"))
    assert run.core.runnable
    assert run.run() == [[[1]]]


def test_a_dead_frontend_frees_its_inputs_and_ends_its_pause() -> None:
    run = Run()
    run.send(PauseGenerationReq(id="p"), embedding_request("a", [1]), source="f1")
    run.send(embedding_request("b", [2]))
    assert run.plan() is None
    assert not run.core.runnable
    run.send(PeerGone("f1"), source="f1")
    assert run.run() == [[[2]]]
    assert run.core.empty


def test_control_requests_are_answered() -> None:
    run = Run()
    run.send(PauseGenerationReq(id="p"), ContinueGenerationReq(id="c"), FlushCacheReq(id="f"))
    assert [(reply.id, reply.ok) for reply in run.replies] == [("p", True), ("c", True), ("f", True)]


def test_an_encoder_keeps_its_memory() -> None:
    run = Run()
    run.send(ReleaseMemoryReq(id="m", tags=[*MemoryTag]), embedding_request("a", [1]))
    assert [(reply.ok, reply.message) for reply in run.replies] == [(False, "an encoder keeps its memory")]
    assert run.run() == [[[1]]]


def test_a_draining_scheduler_finishes_running_and_refuses_waiting() -> None:
    run = Run()
    run.send(embedding_request("a", [1]), Drain(), embedding_request("b", [2]))
    assert (run.rejected["b"].code, run.rejected["b"].retry) == ("draining", True)
    assert run.run() == [[[1]]]


def test_priority_goes_first_until_patience_ends() -> None:
    run = Run(policy=PolicyName.PRIORITY, token_budget=1, max_skips=2)
    run.send(embedding_request("low", [1]), *(embedding_request(f"h{n}", [10 + n], priority=5) for n in range(4)))
    assert run.run() == [[[10]], [[11]], [[1]], [[12]], [[13]]]


def test_heartbeats_say_what_is_held_for_whom() -> None:
    run = Run()
    run.send(embedding_request("a", ids(1, 8)), embedding_request("b", [2], attempt=3))
    run.send(embedding_request("c", [3]), source="f1")
    run.plan()
    held = run.core.held()
    assert sorted(zip(held["f0"].rids, unpack_ints(held["f0"].attempts), strict=True)) == [("a", 0), ("b", 3)]
    assert list(unpack_ints(held["f0"].indices)) == list(unpack_ints(held["f0"].positions)) == [0, 0]
    assert held["f1"].rids == ["c"]
    load = run.core.load()
    assert (load.queued, load.running, load.queued_tokens, load.running_tokens) == (2, 1, 9, 1)


def test_a_result_that_answers_another_plan_is_a_broken_promise() -> None:
    run = Run()
    run.send(embedding_request("a", [1]))
    run.plan()
    with pytest.raises(ValueError, match="does not answer"):
        run.core.commit(EncodeResult(step=7, vectors=bytes(12)))


@pytest.mark.parametrize("seed", range(8))
def test_every_input_gets_exactly_one_answer_whatever_happens(seed: int) -> None:
    """Attempts, aborts and full peers at random, with up to two steps in flight."""
    chance = random.Random(seed)
    run = Run(token_budget=chance.randrange(1, 16), max_queued=12)
    wanted: dict[tuple[str, str], int] = {}
    for number in range(400):
        frontend = chance.choice(["f0", "f1"])
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                rid = f"{frontend}-{number}"
                run.send(embedding_request(rid, ids(chance.randrange(49), chance.randrange(1, 21))), source=frontend)
                wanted[frontend, rid] = 0
            case 4 if wanted:
                frontend, rid = chance.choice(list(wanted))
                held = run.core.roster.get((frontend, rid))
                if held is not None:
                    assert isinstance(held.request, TokenizedEmbeddingReqInput)
                    wanted[frontend, rid] += 1
                    again = embedding_request(
                        rid,
                        list(unpack_ints(held.request.input_ids)),
                        attempt=wanted[frontend, rid],
                        alone=chance.random() < 0.3,
                    )
                    run.send(again, source=frontend)
            case 5 if wanted:
                frontend, rid = chance.choice(list(wanted))
                run.send(AbortReq(rid=rid), source=frontend)
            case 6:
                run.send(PeerBlocked(frontend) if chance.random() < 0.5 else PeerDrained(frontend))
            case _:
                if len(run.in_flight) < 2:
                    run.plan()
                elif run.in_flight:
                    run.commit()
    run.send(PeerDrained("f0"), PeerDrained("f1"))
    while run.core.runnable or run.in_flight:
        run.plan()
        if run.in_flight:
            run.commit()
    assert run.core.empty
    assert len(run.core.waiting) == 0
    for (frontend, rid), attempt in wanted.items():
        key = frontend, rid, attempt
        answers = (key in run.vectors) + (key in run.finishes) + (rid in run.rejected)
        assert answers == 1, key
    assert len(run.vectors) > 20
