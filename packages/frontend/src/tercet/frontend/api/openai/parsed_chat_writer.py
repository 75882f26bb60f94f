"""Writer of chat responses that may contain reasoning and tool calls."""

from collections.abc import Mapping
from typing import Any

import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.chat_writer import ChatChunks
from tercet.frontend.api.openai.usage import usage
from tercet.frontend.chat.output_parser import Call, OutputParser, merge_events
from tercet.frontend.chat.planner import ChatPlan
from tercet.frontend.http.loop_turns import Steps, no_steps
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState, Update
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.protocol.messages.values import FinishReason, FinishType

_ROLE = b'{"role":"assistant","content":null,"refusal":null}'
_NO_TEXT = b'{"content":""}'
"""Final delta of a choice without text or calls, for clients that concatenate contents and fail on null."""


class ParsedChatWriter:
    """Writer of a chunk for each parser event. Log-probabilities and token ids go with the first chunk of their tokens.

    A client that sent `functions` gets its call as `function_call`.
    """

    def __init__(self, rid: str, body: ChatRequest, model: ServedModel, plan: ChatPlan, reasoning_field: str) -> None:
        self._builder = ChatChunks(rid, body, model)
        self._plan = plan
        self._reasoning_field = reasoning_field
        self._functions = body.uses_functions
        self._call_finish_reason = "stop" if body.names_tool else "function_call" if self._functions else "tool_calls"
        self._readers: list[OutputParser] = []
        self._started: set[int] = set()
        self._has_content: set[int] = set()
        """Choices that have text or calls."""

    @property
    def head(self) -> Mapping[str, Any]:
        return self._builder.head

    def usage(self, generation: Generation) -> dict[str, Any]:
        return usage(generation, reasoning_tokens=self._reasoning_tokens)

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return the chunks for new tokens, the role first."""
        if not self._readers:
            self._readers = self._plan.readers(generation)
        return b"".join(self._events_of(generation, arrival.update) for arrival in arrivals)

    def _events_of(self, generation: Generation, update: Update) -> bytes:
        builder, index = self._builder, update.index
        reader = self._readers[index]
        chunks = []
        if index not in self._started:
            self._started.add(index)
            builder.count(generation, 0, self._reasoning_tokens)
            chunks.append(builder.first_chunk(generation, index, _ROLE))
        deltas = [delta for event in reader.read(update) if (delta := self._delta(event)) is not None]
        if any(delta.keys() != {self._reasoning_field} for delta in deltas):
            self._has_content.add(index)
        builder.count(generation, len(update.token_ids), self._reasoning_tokens)
        scored = builder.logprobs(update.token_ids, update.logprobs)
        ids = update.token_ids if builder.has_ids else []
        if not deltas and (len(ids) or (scored is not None and scored["content"])):
            deltas = [{}]
        for delta in deltas:
            chunks.append(builder.chunk(index, orjson.dumps(delta), orjson.dumps(scored), token_ids=ids))
            scored, ids = None, []
        if update.finish is not None:
            last = b"{}" if index in self._has_content else _NO_TEXT
            reason = self._reason(update.finish, reader)
            chunks.append(builder.chunk(index, last, reason=reason, finish=update.finish))
        return b"".join(chunks)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return {self._reasoning_field: text}
            case ToolCallStart(_, name) if self._functions:
                return {"function_call": {"name": name, "arguments": ""}}
            case ToolArgumentsDelta(_, text) if self._functions:
                return {"function_call": {"arguments": text}}
            case ToolCallStart(index, name, call_id, custom=True):
                tool = {"name": name, "input": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "custom", "custom": tool}]}
            case ToolArgumentsDelta(index, text, custom=True):
                return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
            case ToolCallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case ToolArgumentsDelta(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ToolCallEnd():
                return None

    def _reason(self, finish: FinishReason, reader: OutputParser) -> str:
        """Return the finish reason.

        A finished tool call sets its own reason, unless the client named the tool or the output was cut off.
        """
        has_call = reader.calls and not reader.in_call and finish.type is FinishType.STOP
        return self._call_finish_reason if has_call else finish.type

    def end(self, generation: Generation) -> bytes:
        return self._builder.end(generation, self._reasoning_tokens)

    def prepare(self, state: ReqState) -> Steps[None]:
        """Do nothing: events do not depend on the prompt."""
        return no_steps(state)

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return a `chat.completion` object."""
        self._readers = self._plan.readers(generation)
        written = []
        for choice in choices:
            row = self._choice(choice, self._readers[choice.index])
            yield
            row["logprobs"] = yield from self._builder.logprob_steps(choice.token_ids, choice.logprobs)
            written.append(row)
        return (yield from self._builder.full_response(generation, written, self._reasoning_tokens))

    @property
    def _reasoning_tokens(self) -> int:
        return sum(reader.reasoning_tokens for reader in self._readers)

    def _choice(self, choice: FinishedChoice, reader: OutputParser) -> dict[str, Any]:
        parsed = merge_events(reader.read(Update(choice.index, choice.text, choice.token_ids, [], choice.finish)))
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message[self._reasoning_field] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.text or None
            message |= self._call_fields(parsed.calls)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(choice.finish, reader) if choice.finish else None,
            **self._builder.stop_fields(choice.finish),
            **self._builder.ids(choice.token_ids),
        }

    def _call_fields(self, calls: list[Call]) -> dict[str, Any]:
        if self._functions:
            return {"function_call": _function(calls[0])}
        return {"tool_calls": list(map(_tool_call, calls))}


def _tool_call(call: Call) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": _function(call)}


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}
