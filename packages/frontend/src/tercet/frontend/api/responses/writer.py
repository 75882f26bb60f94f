"""A response as it comes to be: what the model says becomes items, and every change of them an event.

Nothing here knows of time, sockets or chance: the same findings give the same items and events, whoever makes them.
Ids of items follow from the response's own, so that a response begun again keeps them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never

from tercet.frontend.api.responses.namespaces import spaces_of
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


class ResponseWriter:
    """Writes one response. `body` is the response object, which it keeps up to date.

    `call_ids` are those of calls, by their place in the output, that an earlier run has told already.
    """

    def __init__(self, body: dict[str, Any], call_ids: Mapping[int, str] = MappingProxyType({})) -> None:
        self.body = body
        self._call_ids = call_ids
        self._spaces = spaces_of(body["tools"])
        self._open: Item | None = None
        self._blank = ""
        """White space that is text only if text follows."""
        self._blank_logprobs: list[dict[str, Any]] = []

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to say."""
        return self.body["status"] not in {"queued", "in_progress"}

    def begin(self) -> list[Change]:
        """The response exists."""
        queued = [self._about("response.queued")] if self.body["status"] == "queued" else []
        return [self._about("response.created"), *queued]

    def progress(self) -> list[Change]:
        """The model begins to speak."""
        self.body["status"] = "in_progress"
        return [self._about("response.in_progress")]

    def take(self, findings: Sequence[Event], logprobs: LogprobList = ()) -> list[Change]:
        """What the model said; `logprobs` are those of the tokens it said it in."""
        changes: list[Change] = []
        for finding in findings:
            match finding:
                case TextDelta(text):
                    changes += self._text(text, logprobs)
                    logprobs = ()
                case ReasoningDelta(text):
                    changes += self._into(Reasoning, text)
                case ToolCallStart():
                    changes += self._call(finding)
                case ToolArgumentsDelta(_, text):
                    assert self._open is not None
                    changes += self._open.more(text)
                case ToolCallEnd():
                    changes += self._close("completed")
                case _:
                    assert_never(finding)
        return changes

    def end(self, finish: FinishType, usage: dict[str, Any], now: int, logprobs: LogprobList = ()) -> list[Change]:
        """The model has said all it says; `logprobs` are those of its last tokens, if they added no text."""
        cut = finish is FinishType.LENGTH
        changes = []
        if not self.body["output"]:
            if self._blank:
                changes += self._into(Message, self._blank, self._blank_logprobs)
            else:
                changes += self._begin(Message(self._id(Message.prefix), 0))
        if isinstance(self._open, Message):
            self._open.score(logprobs)
        changes += self._leave("incomplete" if cut else "completed")
        self.body["usage"] = usage
        if cut:
            self.body["status"] = "incomplete"
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
            return [*changes, self._about("response.incomplete")]
        self.body["status"] = "completed"
        self.body["completed_at"] = now
        return [*changes, self._about("response.completed")]

    def fail(self, error: ApiError) -> list[Change]:
        """It comes to nothing more. The code is among the few that OpenAI has for a response."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        changes = self._close("incomplete")
        self.body |= {"status": "failed", "completed_at": None, "incomplete_details": None}
        self.body["error"] = {"code": code, "message": error.message}
        return [*changes, self._about("response.failed")]

    # Inside.

    def _text(self, text: str, logprobs: LogprobList) -> list[Change]:
        if not isinstance(self._open, Message):
            text, logprobs = self._blank + text, [*self._blank_logprobs, *logprobs]
            if not text.strip():
                self._blank, self._blank_logprobs = text, logprobs
                return []
            self._forget_blank()
        return self._into(Message, text, logprobs)

    def _into(self, kind: type[TextItem], text: str, logprobs: LogprobList = ()) -> list[Change]:
        """More text of the open item, or of a new one unless that is of this kind."""
        changes: list[Change] = []
        if not isinstance(self._open, kind):
            changes += self._leave("completed")
            changes += self._begin(kind(self._id(kind.prefix), len(self.body["output"])))
        assert self._open is not None
        return [*changes, *self._open.more(text, logprobs)]

    def _call(self, start: ToolCallStart) -> list[Change]:
        self._forget_blank()
        changes, place = self._leave("completed"), len(self.body["output"])
        call_id = self._call_ids.get(place) or start.id or self._id("call")
        namespace, name = self._spaces.get(start.name, (None, start.name))
        kind = CustomCall if start.custom else Call
        return [*changes, *self._begin(kind(self._id(kind.prefix), place, name, call_id, namespace))]

    def _forget_blank(self) -> None:
        self._blank, self._blank_logprobs = "", []

    def _begin(self, item: Item) -> list[Change]:
        self._open = item
        self.body["output"].append(item.shape("in_progress"))
        return item.opening()

    def _leave(self, status: str) -> list[Change]:
        """Close what is open. A call ends where its notation says so, and is not complete before that."""
        return self._close("incomplete" if isinstance(self._open, Call) else status)

    def _close(self, status: str) -> list[Change]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self.body["output"][item.place] = item.shape(status)
        return item.closing(status)

    def _about(self, kind: str) -> Change:
        # The object goes on changing; the event tells of it as it is now.
        return {"type": kind, "response": {**self.body, "output": list(self.body["output"])}}

    def _id(self, prefix: str) -> str:
        place = len(self.body["output"])
        digest = hashlib.sha256(f"{self.body['id']} {prefix} {place}".encode()).hexdigest()
        return f"{prefix}_{digest[:48]}"
