"""Writer of Anthropic messages: parsed output becomes content blocks, and each change an event.

Pure code: no clock, sockets or randomness.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, assert_never

import orjson

from tercet.frontend.json_number import parse_json
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.protocol.messages.values import FinishReason, FinishType

Change = dict[str, Any]
_ONLY_AT_START = {"cache_creation", "inference_geo", "service_tier"}
"""Fields of `usage` that the last counts of a stream lack."""


class MessageWriter:
    """Writer of one message. `body` is the message object, kept up to date."""

    def __init__(self, message: str, model: str, *, include_thinking: bool = True) -> None:
        self.body: dict[str, Any] = {
            "id": message,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "container": None,
            "diagnostics": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": None,
        }
        self._tell_thoughts = include_thinking
        self._open = ""
        """Type of the open block; empty if none is open."""
        self._parts: list[str] = []
        self._pending_space = ""
        """White space that becomes text only if text follows."""
        self._in_call = False
        """The last tool call has not ended."""

    def begin(self, usage: dict[str, Any]) -> list[Change]:
        """Return the first events of the message."""
        self.body["usage"] = usage
        return [{"type": "message_start", "message": {**self.body, "content": []}}, {"type": "ping"}]

    def add(self, events: Sequence[Event]) -> list[Change]:
        """Add parsed output; return the events."""
        changes: list[Change] = []
        for event in events:
            match event:
                case TextDelta(text):
                    changes += self._text(text)
                case ReasoningDelta(text):
                    changes += self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    self._parts.append(text)
                    if self._tell_thoughts:
                        changes.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case ToolCallStart():
                    changes += self._call(event)
                case ToolArgumentsDelta(_, text):
                    self._parts.append(text)
                    changes.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case ToolCallEnd():
                    self._in_call = False
                    changes += self._close()
                case _:
                    assert_never(event)
        return changes

    def end(self, finish: FinishReason, usage: dict[str, Any]) -> list[Change]:
        """Return the last events of the message.

        An unfinished tool call does not set the stop reason, since it cannot be used.
        """
        changes = []
        if self._pending_space and not self.body["content"]:
            changes += self._append_text(self._pending_space)
        changes += self._close()
        called = not self._in_call and any(block["type"] == "tool_use" for block in self.body["content"])
        if finish.type is FinishType.LENGTH:
            self.body["stop_reason"] = "max_tokens"
        elif called:
            self.body["stop_reason"] = "tool_use"
        elif isinstance(finish.matched, str):
            self.body |= {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        else:
            self.body["stop_reason"] = "end_turn"
        self.body["usage"] = usage
        delta = {name: self.body[name] for name in ("container", "stop_details", "stop_reason", "stop_sequence")}
        counts = {name: value for name, value in usage.items() if name not in _ONLY_AT_START}
        return [*changes, {"type": "message_delta", "delta": delta, "usage": counts}, {"type": "message_stop"}]

    def _text(self, text: str) -> list[Change]:
        if self._open != "text":
            if not (self._pending_space + text).strip():
                self._pending_space += text
                return []
            text, self._pending_space = self._pending_space + text, ""
        return self._append_text(text)

    def _append_text(self, text: str) -> list[Change]:
        changes = self._open_block("text", {"type": "text", "text": "", "citations": None})
        self._parts.append(text)
        return [*changes, self._delta({"type": "text_delta", "text": text})]

    def _call(self, start: ToolCallStart) -> list[Change]:
        self._pending_space, self._in_call = "", True
        changes = self._close()
        block: dict[str, Any] = {
            "type": "tool_use",
            "id": start.id or self._new_call_id(),
            "name": start.name,
            "input": {},
            "caller": {"type": "direct"},
            "toolset_name": None,
        }
        return [*changes, *self._open_block("tool_use", block)]

    def _new_call_id(self) -> str:
        """Return an id for a tool call that has none."""
        return f"toolu_{self.body['id']}_{len(self.body['content'])}"

    def _open_block(self, kind: str, block: dict[str, Any]) -> list[Change]:
        """Open a block, unless one of this kind is open."""
        if self._open == kind:
            return []
        changes = self._close()
        self._open = kind
        self.body["content"].append(block)
        return [*changes, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _close(self) -> list[Change]:
        if not self._open:
            return []
        changes: list[Change] = []
        block: dict[str, Any] = self.body["content"][-1]
        text = "".join(self._parts)
        match self._open:
            case "text":
                block["text"] = text
            case "thinking":
                # Clients store a signature with the thinking block and send both back. This one is never verified.
                block["thinking"] = text if self._tell_thoughts else ""
                block["signature"] = hashlib.sha256(text.encode()).hexdigest()
                changes.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
            case "tool_use":
                block["input"] = _arguments(text)
        self._open, self._parts = "", []
        return [*changes, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> Change:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.body["content"]) - 1


def _arguments(text: str) -> dict[str, Any]:
    """Return the input of a tool call; empty if its JSON was cut off."""
    try:
        value = parse_json(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
