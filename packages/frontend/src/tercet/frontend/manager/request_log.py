"""Log lines of requests that ended: of all or a share of them (`--log-requests`), and of slow ones."""

import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from tercet.frontend.config.config import TelemetryOptions
from tercet.frontend.http.loop_turns import LoopTurns
from tercet.frontend.http.request_id import current_request_id
from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request_reports import EndedRequest
from tercet.frontend.manager.request_table import outcome_of
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from tercet.frontend.routing.request_state import RequestState

logger = logging.getLogger(__name__)

SHORT = 2048
"""Characters of the input, and of all outputs of a request, that level 2 shows."""
LONG = 16_384
"""Those that level 3 shows. A JSON line has up to 12 times as many: `tercet serve` breaks lines of 16 times as many."""


class RequestLog:
    """Log of requests that ended. `chance` returns a number in [0, 1), which the share is compared with."""

    def __init__(self, options: TelemetryOptions, chance: Callable[[], float] = random.random) -> None:
        self._share = options.log_requests_share if options.log_requests else 0.0
        self._level = options.log_requests_level
        self._most = {2: SHORT, 3: LONG}.get(self._level, 0)
        self._slow_seconds = options.slow_request_seconds or float("inf")
        self._chance = chance

    async def report(self, ended: EndedRequest, turns: LoopTurns) -> None:
        """Log each prompt of a request that ended."""
        slow = ended.ended_at - ended.admitted_at >= self._slow_seconds
        logs = self._chance() < self._share
        for state in ended.states if logs or slow else ():
            turn = partial(turns.turn, ended.owner)
            outputs = await self._outputs(state, turn) if logs else []
            await turn()
            fields = self._metadata(state, ended.admitted_at, ended.ended_at)
            if slow:
                _write(logging.WARNING, "slow request", fields)
            if logs:
                _write(logging.INFO, "request", fields | self._content(state, outputs))

    def _metadata(self, state: RequestState, admitted_at: float, now: float) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": current_request_id(),
            "rid": state.rid,
            "model": state.model.name,
            "outcome": outcome_of(state).value,
            "prompt_tokens": state.prompt_tokens,
            "output_tokens": state.output_tokens,
            "dispatches": len(state.dispatches),
            "scheduler": state.dispatches[-1].scheduler if state.dispatches else "",
            "tokenize_seconds": round(state.started_at - admitted_at, 4),
            "seconds": round(now - admitted_at, 4),
        }
        if state.queue_time is not None:
            fields["queue_seconds"] = round(state.queue_time, 4)
        if state.first_token_at is not None:
            fields["first_token_seconds"] = round(state.first_token_at - admitted_at, 4)
        if isinstance(state, ReqState):
            fields["cached_tokens"] = state.cached_tokens
            fields["finish_reasons"] = ",".join(each.finish.type.value for each in state.choices if each.finish)
        if state.error is not None:
            fields["error"] = state.error.code or type(state.error).__name__
        return fields

    async def _outputs(self, state: RequestState, turn: Callable[[], Awaitable[None]]) -> list[str]:
        """Return the beginning of the text of each choice, from level 2 on."""
        if not self._most or not isinstance(state, ReqState):
            return []
        most = max(self._most // len(state.choices), 1)
        texts = []
        for choice in state.choices:
            await turn()
            texts.append(await _text(state, choice.token_ids[:most], most))
        return texts

    def _content(self, state: RequestState, outputs: Sequence[str]) -> dict[str, str]:
        """Return the sampling parameters from level 1 on, and input and output from level 2 on, in JSON."""
        if not self._level or not isinstance(state, ReqState):
            return {}
        content = {"sampling": _json(_sampling(state))}
        if self._most:
            content["input"] = _json(_input(state.request.prompt, self._most))[: self._most]
            content["output"] = _json(outputs)
        return content


def _sampling(state: ReqState) -> dict[str, Any]:
    """Return the parameters that differ from their defaults; of a grammar only its kind, since it may have content."""
    given: dict[str, Any] = msgspec.to_builtins(state.sampling)
    neutral: Mapping[str, Any] = msgspec.to_builtins(type(state.sampling)(max_new_tokens=-1))
    changed = {name: value for name, value in given.items() if value != neutral[name] and name != "grammar"}
    if state.sampling.grammar is not None:
        changed["grammar"] = state.sampling.grammar.kind.value
    return changed


def _input(prompt: Prompt, most: int) -> object:
    """Return the messages of a chat, or at least `most` characters of other prompts."""
    match prompt:
        case ChatPrompt():
            return {"messages": prompt.messages, "tools": prompt.tools} if prompt.tools else prompt.messages
        case TextPrompt():
            return prompt.text[:most]
        case TokenPrompt():
            return prompt.token_ids[:most]


async def _text(state: ReqState, ids: Sequence[int], most: int) -> str:
    """Return the first `most` characters of an output. Ids of padded embeddings have no text."""
    known = list(filter(state.model.tokenizer.has, ids))
    return (await state.model.decode(known, skip_special_tokens=state.request.options.skip_special_tokens))[:most]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _write(level: int, event: str, fields: Mapping[str, object]) -> None:
    """Write a line with each field as `name=value`; the text of clients comes as arguments, never in the format."""
    logger.log(level, f"{event}: " + " ".join(f"{name}=%s" for name in fields), *fields.values())
