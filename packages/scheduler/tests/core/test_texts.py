"""Texts that an encoder reads: encoded into pages, which equal ones share, and apart in the prefix cache."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol.messages.messages import TokenizedGenerateReqInput, UpdateWeightsFromDiskReq
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import WeightsRead
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

START = [1, 7]
A, B, C = [5] * 4, [6] * 9, [7] * 13
"""Texts of 1, 3 and 4 pages."""


def driver(text_pages: int = 8, *, overlap: int = 0, pages: int = 64, encode_steps: int = 1, **config: Any) -> Driver:
    shape = small_capacity(text_pages=text_pages, pages=pages)
    executor = FakeExecutor(shape, encode_steps=encode_steps)
    return Driver(shape, CoreConfig(token_budget=32, **config), overlap=overlap, executor=executor)


def asked(rid: str, text: list[int], prompt: list[int] = START, **more: Any) -> TokenizedGenerateReqInput:
    return request(rid, prompt, text=text, **{"max_new_tokens": 6, "ignore_eos": True, **more})


def check(core: Driver, *requests: TokenizedGenerateReqInput) -> None:
    for each in requests:
        for choice in range(each.sampling.n):
            assert core.output[each.rid, choice] == core.answer(each, choice)
    core.assert_empty()


def run(core: Driver, *requests: TokenizedGenerateReqInput) -> None:
    core.send(*requests)
    core.run()
    check(core, *requests)


def loads(core: Driver) -> list[tuple[list[int], int]]:
    """Return the text and the number of pages of each encoding."""
    return [([*memoryview(load.ids).cast("i")], len(load.pages)) for plan in core.plans for load in plan.texts]


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_request_is_answered_by_its_own_text(overlap: int) -> None:
    core = driver(overlap=overlap)
    run(core, *(asked(f"r{number}", text) for number, text in enumerate((A, B, A, C, B, A))))
    assert core.output["r0", 0] == core.output["r2", 0] != core.output["r1", 0]
    assert sorted(loads(core)) == [(A, 1), (B, 3), (C, 4)], "equal texts share an encoding of as many pages as it needs"


def test_a_choice_without_pages_for_its_text_waits() -> None:
    core = driver(6)
    core.send(asked("b", B), asked("c", C), asked("a", A))
    core.step()
    core.step()
    assert {req.rid for req in core.core.planner.running} == {"a", "b"}
    core.run()
    check(core, asked("b", B), asked("c", C), asked("a", A))


def test_choices_of_one_request_share_their_text() -> None:
    core = driver()
    run(core, asked("a", B, n=3))
    assert loads(core) == [(B, 3)]


def test_a_text_keeps_its_pages_until_others_need_them() -> None:
    core = driver(4)
    for rid, text in (("1", B), ("2", A), ("3", B), ("4", A), ("5", C), ("6", B)):
        run(core, asked(rid, text))
    assert loads(core) == [(B, 3), (A, 1), (C, 4), (B, 3)]


def test_other_tenants_share_no_text() -> None:
    core = driver()
    run(core, asked("a", A, [*range(1, 14)], salt="one"))
    run(core, asked("b", A, [*range(1, 14)], salt="two"))
    assert loads(core) == [(A, 1), (A, 1)]
    assert core.core.counters.cached_tokens == 0


def test_only_equal_texts_hit_the_prefix_cache() -> None:
    core, prompt = driver(), [*range(1, 14)]
    run(core, asked("a", A, prompt))
    run(core, asked("b", B, prompt))
    assert core.core.counters.cached_tokens == 0
    run(core, asked("again", A, prompt))
    assert core.core.counters.cached_tokens == 12


def test_retracted_choices_find_their_texts_again_or_have_them_encoded() -> None:
    core = driver(5, pages=10, reserve=0.0, reserve_floor=0.0)
    run(core, *(asked(f"r{number}", text, max_new_tokens=20) for number, text in enumerate((A, B, C))))
    assert core.core.counters.retractions


def test_a_resumed_choice_has_its_text_encoded() -> None:
    core = driver()
    whole = core.answer(asked("a", B))
    core.output["a", 0] = list(whole[:2])
    core.send(asked("a", B, attempt=1, resume=[Resume(0, pack_ints(whole[:2]))]))
    core.run()
    check(core, asked("a", B))


def test_a_later_attempt_with_another_text_starts_anew() -> None:
    core = driver()
    core.send(asked("a", A))
    core.step()
    core.send(asked("a", B, attempt=1, resume=[Resume(0)]))
    core.run()
    check(core, asked("a", B))


def test_other_weights_encode_again(tmp_path: Any) -> None:
    core = driver()
    run(core, asked("a", A))
    core.send(UpdateWeightsFromDiskReq(id="1", path=str(tmp_path)), WeightsRead(str(tmp_path), ""))
    core.run()
    run(core, asked("b", A))
    assert loads(core) == [(A, 1), (A, 1)]


def test_wrong_texts_are_rejected() -> None:
    core, other = driver(2), Driver(small_capacity())
    core.send(request("none", START), asked("long", B), asked("id", [999]))
    other.send(asked("text", A))
    codes = {rid: each.code for rid, each in (core.rejected | other.rejected).items()}
    bad = dict.fromkeys(("none", "long", "text"), "invalid_request")
    assert codes == {**bad, "id": "invalid_token_ids"}


def test_the_log_of_requests_with_texts_is_replayed() -> None:
    log, shape, config = io.BytesIO(), small_capacity(text_pages=4), CoreConfig(token_budget=32)
    core = Driver(shape, config, executor=FakeExecutor(shape))
    core.core = RecordingScheduler(Scheduler(config, shape), LogFile(log).record)  # type: ignore[assignment]
    core.check = lambda: None  # type: ignore[method-assign]
    core.send(asked("a", B, n=2), asked("b", C))
    core.run()
    log.seek(0)
    plans = [(recorded, now) for _, recorded, now in replay(read_events(log))]
    assert sum(plan is not None and bool(plan.texts) for plan, _ in plans) == 2
    assert all(recorded == now for recorded, now in plans)


STEPS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 12), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, pages=st.integers(3, 6), overlap=st.integers(0, 1), encode_steps=st.integers(1, 3))
def test_any_order_of_requests_is_answered(steps: list[Any], pages: int, overlap: int, encode_steps: int) -> None:
    core = driver(pages, overlap=overlap, pages=16, encode_steps=encode_steps)
    wanted = []
    for number, (length, n, tokens, turns, salted) in enumerate(steps):
        salt = "s" if salted else ""
        wanted.append(asked(f"r{number}", [length] * length, n=n, max_new_tokens=tokens, salt=salt))
        core.send(wanted[-1])
        for _ in range(turns):
            core.step()
    core.run()
    check(core, *wanted)
