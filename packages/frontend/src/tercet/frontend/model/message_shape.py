"""Sequences of messages that a chat template accepts, found by rendering probes, and the conversion of others to them.

Templates refuse or ignore what their model was not trained on: a system message that is not the first, any system
message, two messages of one role in a row, ids of tool calls in another form than their own. Clients send all of these.
Texts are moved and joined; none is lost.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""Renders messages; None if the template refuses or fails."""

_FIRST, _SECOND, _THIRD = "tercet-first", "tercet-second", "tercet-third"
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The form of Mistral's ids, which every template accepts."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class SystemPlace(StrEnum):
    """Places at which a template renders a system message."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    NOWHERE = "nowhere"


class MessageShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of messages that a template accepts."""

    system: SystemPlace = SystemPlace.ANYWHERE
    developer: SystemPlace = SystemPlace.ANYWHERE
    """The same for messages of the role "developer", which are system messages to templates that do not know it."""
    alternates: bool = False
    """Two user messages in a row are refused."""
    short_call_ids: bool = False
    """Ids of tool calls have nine letters and digits."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Convert messages to a sequence that the template accepts. An accepted sequence is returned as it is."""
        shaped = [*messages]
        if self.system is not SystemPlace.ANYWHERE or self.developer is not SystemPlace.ANYWHERE:
            shaped = self._with_one_system(shaped)
        if self.alternates:
            shaped = _alternating(shaped)
        if self.short_call_ids:
            shaped = [_with_short_ids(message) for message in shaped]
        return shaped

    def _with_one_system(self, messages: list[Message]) -> list[Message]:
        """Fold instructions into the first message, or into the first user message if the template has no place."""
        places = {"system": self.system, "developer": self.developer}
        kept: list[Message] = []
        folded: list[Message] = []
        for number, message in enumerate(messages):
            place = places.get(message["role"], SystemPlace.ANYWHERE)
            stays = place is SystemPlace.ANYWHERE or (place is SystemPlace.FIRST and number == 0)
            (kept if stays else folded).append(message)
        if not folded:
            return messages
        role = folded[0]["role"]
        if kept and kept[0]["role"] in places:
            return [_joined([kept[0], *folded]), *kept[1:]]
        if places[role] is SystemPlace.FIRST:
            return [_joined(folded), *kept]
        for number, message in enumerate(kept):
            if message["role"] == "user":
                merged = _joined([*folded, message])
                return [*kept[:number], {**message, "content": merged["content"]}, *kept[number + 1 :]]
        return [{"role": "user", "content": _joined(folded)["content"]}, *kept]


def find_shape(render: Render, *, knows_developer: bool) -> MessageShape:
    """Find the sequences that a template accepts, by rendering probes."""
    system = _system_place(render, "system")
    return MessageShape(
        system=system,
        developer=_system_place(render, "developer") if knows_developer else system,
        alternates=_refuses_neighbors(render),
        short_call_ids=_needs_short_ids(render),
    )


def _system_place(render: Render, role: str) -> SystemPlace:
    if not _renders(render, [("user", _FIRST)]):
        return SystemPlace.ANYWHERE  # the template refuses every probe: leave messages to it
    if not _renders(render, [(role, _FIRST), ("user", _SECOND)]):
        return SystemPlace.NOWHERE
    second = [(role, _FIRST), (role, _SECOND), ("user", _THIRD)]
    later = [(role, _FIRST), ("user", _SECOND), (role, _THIRD)]
    return SystemPlace.ANYWHERE if all(_renders(render, each) for each in (second, later)) else SystemPlace.FIRST


def _refuses_neighbors(render: Render) -> bool:
    """Return whether a template refuses two user messages in a row, and takes them with an answer between them."""
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    return render(turns[:1] * 2) is None and render(turns) is not None


def _renders(render: Render, messages: Sequence[tuple[str, str]]) -> bool:
    """Return whether a template renders the texts of all messages, in order."""
    text = render([{"role": role, "content": content} for role, content in messages])
    if text is None:
        return False
    places = [text.find(content) for _, content in messages]
    return -1 not in places and places == sorted(places)


def _needs_short_ids(render: Render) -> bool:
    """Return whether a template renders a call and its result with a short id and refuses them with a long one."""
    return _renders_call(render, "a1b2c3d4e") and not _renders_call(render, "call_0123456789abcdefghijklmn")


def _renders_call(render: Render, call_id: str) -> bool:
    call = {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": {}}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _FIRST, "name": "probe", "tool_call_id": call_id},
    ]
    text = render(messages)
    return text is not None and _FIRST in text


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """Join neighbors of one role. Results of tools stay apart, and so does a message after one with calls."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        if last is not None and last["role"] == message["role"] != "tool" and not last.get("tool_calls"):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else {**run[-1], "content": _joined(run)["content"]} for run in runs]


def _joined(messages: Sequence[Message]) -> Message:
    """Return the first message with the texts of all, between blank lines."""
    texts = [text for text in map(_text_of, messages) if text]
    return {**messages[0], "content": "\n\n".join(texts)}


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _with_short_ids(message: Message) -> Message:
    """Map the ids of calls and results; equal ids stay equal."""
    changed: Message = {}
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in calls]
    if (call_id := message.get("tool_call_id")) is not None:
        changed["tool_call_id"] = short_id(call_id)
    return {**message, **changed} if changed else message


def short_id(call_id: str) -> str:
    """Return nine letters and digits for an id of any client; an id of this form is returned as it is."""
    if _CALL_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)
