"""The common path of all generating endpoints: submit, wait for the first token, then stream or collect."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.errors import ApiError, ServerError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.loop_turns import Steps, turns_of
from tercet.frontend.http.sse import EventStream, cancel_on_disconnect, event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.protocol.messages.values import FinishReason, Logprobs

logger = logging.getLogger(__name__)


STEP_TOKENS = 64
"""Maximum tokens with log-probabilities in one event, if more have arrived than could be sent."""


class FinishedChoice(msgspec.Struct):
    """A finished choice."""

    state: ReqState
    prompt: int
    index: int
    text: str
    logprobs: list[Logprobs]
    finish: FinishReason | None

    @property
    def token_ids(self) -> Sequence[int]:
        """Return all tokens of the choice."""
        return self.state.choices[self.index].token_ids


class ResponseWriter(Protocol):
    """Writer of one endpoint's responses. A new one is made for each HTTP request."""

    def prepare(self, state: ReqState) -> Steps[None]:
        """Do the long part of the next `events` for a prompt, if there is one."""
        ...

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return the events for new tokens."""
        ...

    def end(self, generation: Generation) -> bytes:
        """Return the events after the last token."""
        ...

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return the JSON body. Choices are ordered by prompt, then by index."""
        ...


async def respond(
    request: Request,
    manager: TokenizerManager,
    work: Sequence[GenerateRequest],
    writer: ResponseWriter,
    *,
    stream: bool,
    rid: str = "",
    media_type: str = "application/json",
    on_finished: Callable[[Generation], Awaitable[None]] | None = None,
    on_written: Callable[[Generation], Awaitable[None]] | None = None,
) -> Response:
    """Generate and respond. Errors before the first token raise ApiError; later ones become an event of the stream.

    `on_finished` is awaited once all choices have finished without an error, `on_written` once the writer has written
    them as well. The client gets the end after both.
    """
    generation = await cancel_on_disconnect(request, manager.submit(work, rid))
    arrivals = generation.arrivals() if on_finished is None else _with_callback(generation, on_finished)
    try:
        if stream:
            first_updates = await cancel_on_disconnect(request, anext(arrivals))
            run = partial(turns_of(request).run, caller_of(request).owner)
            events = _events(generation, first_updates, arrivals, writer, run, on_written)
            return EventStream(events, on_close=lambda: manager.release(generation))
        choices = await cancel_on_disconnect(request, collect(generation, arrivals))
        writing = turns_of(request).run(caller_of(request).owner, writer.full_response(generation, choices))
        body = await cancel_on_disconnect(request, writing)
        if on_written is not None:
            await on_written(generation)
    except BaseException:
        manager.release(generation)
        raise
    manager.release(generation)
    return Response(body, media_type=media_type)


async def _with_callback(
    generation: Generation, on_finished: Callable[[Generation], Awaitable[None]]
) -> AsyncIterator[list[GenerationUpdate]]:
    pending = True
    async for updates in generation.arrivals():
        if pending and all(state.done and state.error is None for state in generation.states):
            pending = False
            await on_finished(generation)
        yield updates


async def _events(
    generation: Generation,
    first_updates: list[GenerationUpdate],
    arrivals: AsyncIterator[list[GenerationUpdate]],
    writer: ResponseWriter,
    run: Callable[[Steps[bytes]], Awaitable[bytes]],
    on_written: Callable[[Generation], Awaitable[None]] | None,
) -> AsyncIterator[bytes]:
    """Yield events as tokens arrive.

    Log-probabilities may be long, so they are written in turns of the loop.
    """
    scored = any(state.request.options.logprobs is not None for state in generation.states)
    try:
        yield (
            await run(_event_steps(writer, generation, first_updates))
            if scored
            else writer.events(generation, first_updates)
        )
        async for updates in arrivals:
            yield await run(_event_steps(writer, generation, updates)) if scored else writer.events(generation, updates)
        if on_written is not None:
            await on_written(generation)
        yield writer.end(generation)
    except ApiError as error:
        yield event(error.body())
    except Exception:
        logger.exception("http stream failed: rid=%s", generation.states[0].rid)
        yield event(ServerError("The server failed this request.").body())


def _event_steps(writer: ResponseWriter, generation: Generation, updates: list[GenerationUpdate]) -> Steps[bytes]:
    """Write the events, a few tokens of one choice in each step."""
    written = []
    for arrival in updates:
        yield from writer.prepare(generation.states[arrival.prompt])
        for update in arrival.update.cut(STEP_TOKENS):
            written.append(writer.events(generation, [GenerationUpdate(arrival.prompt, update)]))
            yield
    return b"".join(written)


async def collect(generation: Generation, arrivals: AsyncIterator[list[GenerationUpdate]]) -> list[FinishedChoice]:
    """Return all choices when they have finished, ordered by prompt, then by index. Raises ApiError."""
    generation.notify_on_finish_only()
    choices = {
        (prompt, choice.index): FinishedChoice(state, prompt, choice.index, "", [], None)
        for prompt, state in enumerate(generation.states)
        for choice in state.choices
    }
    async for updates in arrivals:
        for arrival in updates:
            update = arrival.update
            choice = choices[arrival.prompt, update.index]
            choice.text += update.text
            choice.logprobs += update.logprobs
            choice.finish = update.finish
    return list(choices.values())
