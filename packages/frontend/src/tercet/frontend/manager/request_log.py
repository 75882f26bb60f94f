"""Log lines of requests that ended: of all or a share of them (`--log-requests`), and of slow ones."""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tercet.frontend.config.config import TelemetryOptions
from tercet.frontend.http.request_id import current_request_id
from tercet.frontend.manager.embedding_state import EmbeddingBatch
from tercet.frontend.manager.req_state import Generation, ReqState
from tercet.frontend.manager.request_table import outcome_of
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from tercet.frontend.routing.request_state import RequestState

logger = logging.getLogger(__name__)

SHORT = 2048
"""Characters of the input and of each output that level 2 shows."""


class RequestLog:
    """Log of requests as they end. `chance` returns a number in [0, 1), which the share is compared with."""

    def __init__(self, options: TelemetryOptions, chance: Callable[[], float] = random.random) -> None:
        self._share = options.log_requests_share if options.log_requests else 0.0
        self._level = options.log_requests_level
        self._slow_seconds = options.slow_request_seconds or float("inf")
        self._chance = chance

    def on_end(self, asked: Generation | EmbeddingBatch, states: Sequence[RequestState], now: float) -> None:
        """Log each prompt of a request that ended."""
        slow = now - asked.slot.admitted_at >= self._slow_seconds
        logs = self._chance() < self._share
        for state in states if logs or slow else ():
            fields = self._metadata(state, asked.slot.admitted_at, now)
            if slow:
                _write(logging.WARNING, "slow request", fields)
            if logs:
                _write(logging.INFO, "request", fields | self._content(state))

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

    def _content(self, state: RequestState) -> dict[str, str]:
        """Return the sampling parameters from level 1 on, and input and output from level 2 on, in JSON."""
        if not self._level or not isinstance(state, ReqState):
            return {}
        content = {"sampling": _json(_sampling(state))}
        if self._level > 1:
            most = SHORT if self._level == 2 else None
            content["input"] = _json(_input(state.request.prompt))[:most]
            content["output"] = _json([_output(state, index, most) for index in range(len(state.choices))])
        return content


def _sampling(state: ReqState) -> dict[str, Any]:
    """Return the parameters that differ from their defaults; of a grammar only its kind, since it may have content."""
    given: dict[str, Any] = msgspec.to_builtins(state.sampling)
    neutral: Mapping[str, Any] = msgspec.to_builtins(type(state.sampling)(max_new_tokens=-1))
    changed = {name: value for name, value in given.items() if value != neutral[name] and name != "grammar"}
    if state.sampling.grammar is not None:
        changed["grammar"] = state.sampling.grammar.kind.value
    return changed


def _input(prompt: Prompt) -> object:
    match prompt:
        case ChatPrompt():
            return {"messages": prompt.messages, "tools": prompt.tools} if prompt.tools else prompt.messages
        case TextPrompt():
            return prompt.text
        case TokenPrompt():
            return prompt.token_ids


def _output(state: ReqState, index: int, most: int | None) -> str:
    """Return the text of a choice, or its first `most` characters. Ids of padded embeddings have no text."""
    tokenizer, skip = state.model.tokenizer, state.request.options.skip_special_tokens
    ids = [token_id for token_id in state.choices[index].token_ids[:most] if tokenizer.has(token_id)]
    return tokenizer.decode(ids, skip_special_tokens=skip)[:most]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _write(level: int, event: str, fields: Mapping[str, object]) -> None:
    """Write a line with each field as `name=value`; the text of clients comes as arguments, never in the format."""
    logger.log(level, f"{event}: " + " ".join(f"{name}=%s" for name in fields), *fields.values())
