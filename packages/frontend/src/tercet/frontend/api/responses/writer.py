"""Writer of responses: parsed output becomes items, and each change an event.

Pure code: no clock, sockets or randomness. Equal input gives equal items and events. Ids of items derive from the
response's id, so a resumed response keeps them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never

from tercet.frontend.api.responses.namespaces import namespaces_by_name
from tercet.frontend.api.responses.output_items import (
    Call,
    Change,
    CustomCall,
    Item,
    LogprobList,
    Message,
    Reasoning,
    TextItem,
)
from tercet.frontend.errors import ApiError
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.protocol.messages.values import FinishType


class ResponseObjectWriter:
    """Writer of one response. `body` is the response object, kept up to date.

    `call_ids` are those that an earlier run has sent, by index in the output.
    """

    def __init__(self, body: dict[str, Any], call_ids: Mapping[int, str] = MappingProxyType({})) -> None:
        self.body = body
        self._call_ids = call_ids
        self._namespaces = namespaces_by_name(body["tools"])
        self._open: Item | None = None
        self._pending_space = ""
        """White space that becomes text only if text follows."""
        self._pending_logprobs: list[dict[str, Any]] = []

    @property
    def ended(self) -> bool:
        """Return whether the response has finished."""
        return self.body["status"] not in {"queued", "in_progress"}

    def begin(self) -> list[Change]:
        """Return the first events of the response."""
        queued = [self._response_event("response.queued")] if self.body["status"] == "queued" else []
        return [self._response_event("response.created"), *queued]

    def progress(self) -> list[Change]:
        """Mark the response as in progress; return the event."""
        self.body["status"] = "in_progress"
        return [self._response_event("response.in_progress")]

    def add(self, events: Sequence[Event], logprobs: LogprobList = ()) -> list[Change]:
        """Add parsed output; return the events. `logprobs` belong to the tokens of the text."""
        changes: list[Change] = []
        for event in events:
            match event:
                case TextDelta(text):
                    changes += self._text(text, logprobs)
                    logprobs = ()
                case ReasoningDelta(text):
                    changes += self._append_text(Reasoning, text)
                case ToolCallStart():
                    changes += self._call(event)
                case ToolArgumentsDelta(_, text):
                    assert self._open is not None
                    changes += self._open.append(text)
                case ToolCallEnd():
                    changes += self._close("completed")
                case _:
                    assert_never(event)
        return changes

    def end(self, finish: FinishType, usage: dict[str, Any], now: int, logprobs: LogprobList = ()) -> list[Change]:
        """Finish the response; return its last events. `logprobs` belong to final tokens without text."""
        truncated = finish is FinishType.LENGTH
        changes = []
        if not self.body["output"]:
            if self._pending_space:
                changes += self._append_text(Message, self._pending_space, self._pending_logprobs)
            else:
                changes += self._begin(Message(self._id(Message.prefix), 0))
        if isinstance(self._open, Message):
            self._open.score(logprobs)
        changes += self._close_item("incomplete" if truncated else "completed")
        self.body["usage"] = usage
        if truncated:
            self.body["status"] = "incomplete"
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*changes, self._response_event("response.incomplete")]
        self.body["status"] = "completed"
        self.body["completed_at"] = now
        return [*changes, self._response_event("response.completed")]

    def fail(self, error: ApiError) -> list[Change]:
        """Mark the response as failed; return its last events. The error code is one of those that OpenAI defines."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        changes = self._close("incomplete")
        self.body |= {"status": "failed", "completed_at": None, "incomplete_details": None}
        self.body["error"] = {"code": code, "message": error.message}
        return [*changes, self._response_event("response.failed")]

    def _text(self, text: str, logprobs: LogprobList) -> list[Change]:
        if not isinstance(self._open, Message):
            text, logprobs = self._pending_space + text, [*self._pending_logprobs, *logprobs]
            if not text.strip():
                self._pending_space, self._pending_logprobs = text, logprobs
                return []
            self._drop_pending()
        return self._append_text(Message, text, logprobs)

    def _append_text(self, kind: type[TextItem], text: str, logprobs: LogprobList = ()) -> list[Change]:
        """Add text to the open item, or to a new one unless that is of this kind."""
        changes: list[Change] = []
        if not isinstance(self._open, kind):
            changes += self._close_item("completed")
            changes += self._begin(kind(self._id(kind.prefix), len(self.body["output"])))
        assert self._open is not None
        return [*changes, *self._open.append(text, logprobs)]

    def _call(self, start: ToolCallStart) -> list[Change]:
        self._drop_pending()
        changes, place = self._close_item("completed"), len(self.body["output"])
        call_id = self._call_ids.get(place) or start.id or self._id("call")
        namespace, name = self._namespaces.get(start.name, (None, start.name))
        kind = CustomCall if start.custom else Call
        return [*changes, *self._begin(kind(self._id(kind.prefix), place, name, call_id, namespace))]

    def _drop_pending(self) -> None:
        self._pending_space, self._pending_logprobs = "", []

    def _begin(self, item: Item) -> list[Change]:
        self._open = item
        self.body["output"].append(item.to_dict("in_progress"))
        return item.start_events()

    def _close_item(self, status: str) -> list[Change]:
        """Close the open item. A call that the parser has not ended is incomplete."""
        return self._close("incomplete" if isinstance(self._open, Call) else status)

    def _close(self, status: str) -> list[Change]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self.body["output"][item.place] = item.to_dict(status)
        return item.end_events(status)

    def _response_event(self, kind: str) -> Change:
        # Copied, because the body changes later.
        return {"type": kind, "response": {**self.body, "output": list(self.body["output"])}}

    def _id(self, prefix: str) -> str:
        place = len(self.body["output"])
        digest = hashlib.sha256(f"{self.body['id']} {prefix} {place}".encode()).hexdigest()
        return f"{prefix}_{digest[:48]}"
