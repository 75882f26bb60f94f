"""Rows are accepted in position order, once, and the state suffices to resume."""

import asyncio

import pytest

from tercet.frontend.errors import ServerError
from tercet.frontend.manager.quota import ApiKeyQuota
from tercet.frontend.manager.req_state import Generation, OutputRow, ReqState, Verdict, unpack_rows
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.testing import decode_spec
from tercet.protocol.messages.messages import BatchStrOutput, FirstTextRow
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Logprobs,
    ModelIdentity,
    ModelLimits,
    SamplingParams,
    pack_floats,
    pack_ints,
    unpack_ints,
)

STOP = FinishReason(FinishType.STOP)


@pytest.fixture
def model(files: dict[str, bytes], limits: ModelLimits) -> ServedModel:
    return ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))


@pytest.fixture
def generation(model: ServedModel) -> Generation:
    """Create a request with two choices, dispatched once."""
    sampling = SamplingParams(max_new_tokens=8, n=2, seed=5)
    options = GenerationOptions(stop=["END"], include_stop=True)
    request = GenerateRequest(model="tiny", prompt=TextPrompt("x"), options=options)
    generation = Generation(ApiKeyQuota().acquire())
    state = ReqState("f-1", request, model, list(range(20)), sampling, generation.wake)
    state.attempt = 0
    generation.states.append(state)
    return generation


def row(
    position: int, *ids: int, index: int = 0, attempt: int = 0, text: str = "", finish: FinishReason | None = None
) -> OutputRow:
    return OutputRow(index, attempt, position, ids, text, None, finish)


def test_rows_in_order_are_taken_once(generation: Generation) -> None:
    [state] = generation.states
    assert state.accept(row(0, 1, 2, text="ab")) is Verdict.ACCEPTED
    assert state.accept(row(0, 1, 2, text="ab")) is Verdict.STALE
    assert state.accept(row(2, 3, text="c")) is Verdict.ACCEPTED
    [update] = state.pop_updates()
    assert (update.text, list(update.token_ids), update.finish) == ("abc", [1, 2, 3], None)
    assert state.pop_updates() == []


def test_a_row_beyond_the_next_position_is_a_gap_and_not_taken(generation: Generation) -> None:
    [state] = generation.states
    state.accept(row(0, 1))
    assert state.accept(row(2, 3, text="c")) is Verdict.GAP
    assert list(state.choices[0].token_ids) == [1]
    assert state.choices[0].chars == 0


def test_rows_of_another_attempt_are_dropped(generation: Generation) -> None:
    [state] = generation.states
    state.accept(row(0, 1))
    state.attempt = 1
    assert state.accept(row(1, 2)) is Verdict.STALE
    assert state.accept(row(1, 2, attempt=2)) is Verdict.STALE
    assert state.accept(row(1, 2, attempt=1)) is Verdict.ACCEPTED


def test_a_choice_ends_exactly_once(generation: Generation) -> None:
    [state] = generation.states
    assert state.accept(row(0, 1, finish=STOP)) is Verdict.ACCEPTED
    assert state.accept(row(1, 2, text="more")) is Verdict.STALE
    assert state.accept(row(1, finish=STOP)) is Verdict.STALE
    assert state.open_indices == [1]
    assert not state.done
    state.accept(row(0, 7, index=1, finish=STOP))
    assert state.done
    assert state.output_tokens == 2


def test_a_row_without_ids_brings_held_back_text_and_the_end(generation: Generation) -> None:
    [state] = generation.states
    state.accept(row(0, 1, text=""))
    assert state.accept(row(1, text="é", finish=STOP)) is Verdict.ACCEPTED
    [update] = state.pop_updates()
    assert (update.text, update.finish) == ("é", STOP)


def test_rows_of_choices_that_were_not_asked_for_are_dropped(generation: Generation) -> None:
    [state] = generation.states
    assert state.accept(row(0, 1, index=2)) is Verdict.STALE
    assert state.accept(row(0, 1, index=-1)) is Verdict.STALE


def test_an_abort_that_nobody_asked_for_is_no_end(generation: Generation) -> None:
    [state] = generation.states
    assert state.accept(row(0, 1, finish=FinishReason(FinishType.ABORT))) is Verdict.ABORTED
    assert (state.done, state.error, state.output_tokens, state.pop_updates()) == (False, None, 0, [])


def test_an_end_that_is_no_answer_is_an_error(generation: Generation) -> None:
    [state] = generation.states
    state.accept(row(0, 1, finish=FinishReason(FinishType.ERROR, message="the matcher failed")))
    assert isinstance(state.error, ServerError)
    assert state.error.message == "the matcher failed"
    assert state.done
    assert state.open_indices == [1]


def test_the_first_dispatch_asks_for_fresh_choices(generation: Generation) -> None:
    [state] = generation.states
    message = state.message(0, "detokenizer-0")
    spec = decode_spec(message)
    assert (message.attempt, message.resume, spec.resume, spec.chars_sent) == (0, [], [], {})
    assert list(unpack_ints(message.input_ids)) == list(range(20))
    assert list(unpack_ints(spec.prompt_tail)) == list(range(12, 20))
    assert (spec.stop, spec.include_stop) == (["END"], True)


def test_a_later_dispatch_resumes_each_open_choice_where_it_was(generation: Generation) -> None:
    [state] = generation.states
    state.accept(row(0, 1, 2, text="añ🎉"))
    state.accept(row(0, 9, index=1, finish=STOP))
    message = state.message(1, "detokenizer-1")
    spec = decode_spec(message)
    assert message.detokenizer == "detokenizer-1"
    assert [(each.index, list(unpack_ints(each.output_ids))) for each in message.resume] == [(0, [1, 2])]
    assert spec.resume == message.resume
    assert spec.chars_sent == {0: 3}
    assert message.sampling.seed == 5


def first_row(index: int, attempt: int, cached: int) -> OutputRow:
    return OutputRow(index, attempt, 0, [1], opening=FirstTextRow(row=0, prompt_tokens=20, cached_tokens=cached))


def test_cached_tokens_come_from_the_first_attempt_with_output(generation: Generation) -> None:
    [state] = generation.states
    state.attempt = 2
    state.accept(first_row(0, 2, 16))
    assert state.cached_tokens == 16


def test_prompt_tokens_computed_by_another_choice_do_not_count_as_cached(generation: Generation) -> None:
    [state] = generation.states
    state.accept(first_row(0, 0, 4))
    state.accept(first_row(1, 0, 19))
    assert state.cached_tokens == 4


def test_prompt_tokens_count_as_cached_only_by_the_first_attempt(generation: Generation) -> None:
    [state] = generation.states
    scores = Logprobs(pack_floats([float("nan")]))
    first = FirstTextRow(row=0, prompt_tokens=20, cached_tokens=4, prompt_logprobs=scores)
    state.accept(OutputRow(0, 0, 0, [1], opening=first))
    state.attempt = 1
    state.accept(OutputRow(0, 1, 1, [2], opening=FirstTextRow(row=0, prompt_tokens=20, cached_tokens=20)))
    assert state.cached_tokens == 4
    assert state.prompt_logprobs is scores


def test_a_batch_is_read_row_by_row() -> None:
    scores = Logprobs(pack_floats([-1.0]))
    batch = BatchStrOutput(
        rids=["a", "b"],
        indices=pack_ints([0, 1]),
        attempts=pack_ints([0, 3]),
        positions=pack_ints([5, 0]),
        offsets=pack_ints([0, 2, 2]),
        token_ids=pack_ints([7, 8]),
        texts=["x", "end"],
        openings=[FirstTextRow(row=0, prompt_tokens=1, cached_tokens=0)],
        finishes={1: STOP},
        logprobs={0: scores},
    )
    (first, a), (second, b) = unpack_rows(batch)
    assert (first, a.index, a.attempt, a.position, list(a.token_ids), a.text) == ("a", 0, 0, 5, [7, 8], "x")
    assert a.opening is batch.openings[0]
    assert a.logprobs is scores
    assert (second, b.index, b.attempt, list(b.token_ids), b.text, b.finish) == ("b", 1, 3, [], "end", STOP)


@pytest.mark.parametrize(
    "damage", [{"texts": []}, {"offsets": pack_ints([0])}, {"positions": b"\0"}, {"attempts": pack_ints([1, 2])}]
)
def test_a_batch_of_uneven_lists_is_refused(damage: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "rids": ["a"],
        "indices": pack_ints([0]),
        "attempts": pack_ints([0]),
        "positions": pack_ints([0]),
        "offsets": pack_ints([0, 1]),
        "token_ids": pack_ints([1]),
        "texts": ["x"],
    }
    batch = BatchStrOutput(**{**fields, **damage})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r".+"):
        list(unpack_rows(batch))


async def test_a_consumer_takes_everything_new_at_once(generation: Generation) -> None:
    [state] = generation.states
    arrivals = generation.arrivals()
    for position in range(5):
        state.accept(row(position, position, text=str(position)))
    state.accept(row(0, 1, index=1, text="x"))
    news = await anext(arrivals)
    assert [(each.prompt, each.update.index, each.update.text) for each in news] == [(0, 0, "01234"), (0, 1, "x")]
    waiting = asyncio.ensure_future(anext(arrivals))
    await asyncio.sleep(0)
    assert not waiting.done()
    state.accept(row(5, 5, finish=STOP))
    assert [each.update.finish for each in await waiting] == [STOP]
    state.accept(row(1, index=1, finish=STOP))
    assert [[each.update.index for each in rest] async for rest in arrivals] == [[1]]


async def test_whoever_takes_answers_whole_is_woken_when_a_choice_ends(generation: Generation) -> None:
    [state] = generation.states
    generation.notify_on_finish_only()
    arrivals = generation.arrivals()
    waiting = asyncio.ensure_future(anext(arrivals))
    for position in range(3):
        state.accept(row(position, position, text=str(position)))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    state.accept(row(0, 1, index=1, text="x", finish=STOP))
    assert [(each.update.text, each.update.finish) for each in await waiting] == [("012", None), ("x", STOP)]
    waiting = asyncio.ensure_future(anext(arrivals))
    state.accept(row(3, 3, text="3"))
    state.fail(ServerError("died"))
    assert [each.update.text for each in await waiting] == ["3"]
    with pytest.raises(ServerError, match="died"):
        await anext(arrivals)


async def test_a_consumer_gets_the_text_before_the_error(generation: Generation) -> None:
    [state] = generation.states
    state.accept(row(0, 1, text="before"))
    state.fail(ServerError("died"))
    arrivals = generation.arrivals()
    assert [each.update.text for each in await anext(arrivals)] == ["before"]
    with pytest.raises(ServerError, match="died"):
        await anext(arrivals)


def test_an_error_does_not_replace_an_answer(generation: Generation) -> None:
    [state] = generation.states
    for index in range(2):
        state.accept(row(0, 1, index=index, finish=STOP))
    state.fail(ServerError("too late"))
    assert state.error is None
