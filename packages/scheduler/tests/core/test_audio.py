"""Audio clips: encoded at few places, which choices share, and apart in the prefix cache."""

import io
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol.messages.audio import AudioInput, Transcript
from tercet.protocol.messages.messages import TokenizedGenerateReqInput, UpdateWeightsFromDiskReq
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import WeightsRead
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

A, B, C = (AudioInput(sha256=name * 32) for name in (b"a", b"b", b"c"))
PROMPT = [*range(1, 14)]


def driver(
    audio: int = 2, *, overlap: int = 0, pages: int = 64, budget: int = 32, encode_steps: int = 1, **config: Any
) -> Driver:
    shape = small_capacity(audio=audio, pages=pages)
    executor = FakeExecutor(shape, encode_steps=encode_steps)
    return Driver(shape, CoreConfig(token_budget=budget, **config), overlap=overlap, executor=executor)


def heard(rid: str, audio: AudioInput, prompt: list[int] = PROMPT, **more: Any) -> TokenizedGenerateReqInput:
    return request(rid, prompt, audio=audio, **{"max_new_tokens": 4, "ignore_eos": True, **more})


def run(core: Driver, *requests: TokenizedGenerateReqInput) -> None:
    core.send(*requests)
    core.run()
    for each in requests:
        for choice in range(each.sampling.n):
            assert core.output[each.rid, choice] == core.answer(each, choice)
    core.assert_empty()


def loads(core: Driver) -> list[list[tuple[int, bytes]]]:
    return [[(load.place, load.sha256[:1]) for load in plan.audio] for plan in core.plans if plan.audio]


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_request_is_answered_by_its_own_audio(overlap: int) -> None:
    core = driver(overlap=overlap)
    run(core, *(heard(f"r{number}", audio) for number, audio in enumerate((A, B, A, C, B, A))))
    assert core.output["r0", 0] == core.output["r2", 0] != core.output["r1", 0]


def test_a_place_is_needed_to_start() -> None:
    core = driver(audio=1)
    core.send(heard("a", A), heard("b", B))
    core.step()
    core.step()
    assert {req.rid for req in core.core.planner.running} == {"a"}
    core.run()
    assert core.output["b", 0] == core.answer(heard("b", B))


def test_choices_of_one_request_share_their_audio() -> None:
    core = driver()
    run(core, heard("a", A, n=3))
    assert loads(core) == [[(0, b"a")]]


def test_an_audio_clip_stays_at_its_place_until_another_needs_it() -> None:
    core = driver(audio=1)
    for rid, audio in (("1", A), ("2", A), ("3", B), ("4", A)):
        run(core, heard(rid, audio))
    assert loads(core) == [[(0, b"a")], [(0, b"b")], [(0, b"a")]]


def test_other_tenants_share_no_audio() -> None:
    core = driver()
    run(core, heard("a", A, salt="one"))
    run(core, heard("b", A, salt="two"))
    assert loads(core) == [[(0, b"a")], [(1, b"a")]]
    assert core.core.counters.cached_tokens == 0


def test_only_equal_audio_clips_hit_the_prefix_cache() -> None:
    core = driver()
    run(core, heard("a", A))
    run(core, heard("b", B))
    assert core.core.counters.cached_tokens == 0
    run(core, heard("again", A))
    assert core.core.counters.cached_tokens == 12


def test_a_retracted_choice_finds_its_audio_again_or_has_it_encoded() -> None:
    core = driver(audio=1, pages=10, reserve=0.0, reserve_floor=0.0)
    run(core, *(heard(f"r{number}", A, max_new_tokens=20) for number in range(2)))
    assert core.core.counters.retractions
    assert loads(core) == [[(0, b"a")]]
    core = driver(audio=2, pages=10, reserve=0.0, reserve_floor=0.0)
    run(core, *(heard(f"r{number}", audio, max_new_tokens=20) for number, audio in enumerate((A, B, C))))
    assert core.core.counters.retractions


def test_a_resumed_choice_has_its_audio_encoded() -> None:
    core = driver()
    whole = core.answer(heard("a", A))
    core.output["a", 0] = list(whole[:2])
    core.send(heard("a", A, attempt=1, resume=[Resume(0, pack_ints(whole[:2]))]))
    core.run()
    assert core.output["a", 0] == whole


def test_a_later_attempt_with_another_output_starts_anew() -> None:
    core = driver()
    core.send(heard("a", A))
    core.step()
    timed = msgspec.structs.replace(A, transcript=Transcript.TIMESTAMPS)
    core.send(heard("a", timed, attempt=1, resume=[Resume(0)]))
    core.run()
    kinds = [init.audio.transcript for plan in core.plans for init in plan.introduce if init.audio]
    assert kinds == [Transcript.TEXT, Transcript.TIMESTAMPS]


def test_other_weights_encode_again(tmp_path: Any) -> None:
    core = driver()
    run(core, heard("a", A))
    core.send(UpdateWeightsFromDiskReq(id="1", path=str(tmp_path)), WeightsRead(str(tmp_path), ""))
    core.run()
    run(core, heard("b", A))
    assert loads(core) == [[(0, b"a")], [(1, b"a")]] or loads(core) == [[(0, b"a")], [(0, b"a")]]


def test_wrong_audio_clips_are_rejected() -> None:
    core = driver()
    core.send(request("none", PROMPT), heard("short", AudioInput(sha256=b"a")))
    text = Driver(small_capacity())
    text.send(heard("deaf", A))
    assert {rid: each.code for rid, each in (core.rejected | text.rejected).items()} == dict.fromkeys(
        ("none", "short", "deaf"), "invalid_request"
    )


def test_the_log_of_requests_with_audio_is_replayed() -> None:
    log, shape, config = io.BytesIO(), small_capacity(audio=1), CoreConfig(token_budget=32)
    core = Driver(shape, config, executor=FakeExecutor(shape))
    core.core = RecordingScheduler(Scheduler(config, shape), LogFile(log).record)  # type: ignore[assignment]
    core.check = lambda: None  # type: ignore[method-assign]
    core.send(heard("a", A, n=2), heard("b", B))
    core.run()
    log.seek(0)
    plans = [(recorded, now) for _, recorded, now in replay(read_events(log))]
    assert sum(plan is not None and bool(plan.audio) for plan, _ in plans) == 2
    assert all(recorded == now for recorded, now in plans)


STEPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 3), st.integers(1, 12), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, places=st.integers(1, 3), overlap=st.integers(0, 1), encode_steps=st.integers(1, 3))
def test_any_order_of_requests_is_answered(steps: list[Any], places: int, overlap: int, encode_steps: int) -> None:
    core = driver(places, overlap=overlap, pages=16, budget=16, encode_steps=encode_steps)
    wanted = []
    for number, (name, n, tokens, turns, salted) in enumerate(steps):
        audio = AudioInput(sha256=name.encode() * 32)
        salt = "s" if salted else ""
        wanted.append(heard(f"r{number}", audio, PROMPT[:tokens], n=n, max_new_tokens=tokens, salt=salt))
        core.send(wanted[-1])
        for _ in range(turns):
            core.step()
    core.run()
    for each in wanted:
        for choice in range(each.sampling.n):
            assert core.output[each.rid, choice] == core.answer(each, choice)
    core.assert_empty()
