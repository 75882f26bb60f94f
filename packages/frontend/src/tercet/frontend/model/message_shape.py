"""Sequences of messages that a chat template accepts, found by rendering probes, and the conversion of others to them.

Templates refuse or ignore what their model was not trained on: a system message that is not the first, any system
message, two messages of one role in a row, tool calls beside others or beside text, results of tools, ids of calls in
another form than their own. Clients send all of these. Texts are moved and joined; none is lost.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from tercet.frontend.model.message_form import (
    PROBE_USER,
    Message,
    Render,
    has_images,
    parts_of,
    probe_call,
    probe_result,
    text_of,
)

_FIRST, _SECOND, _THIRD = "tercet-first", "tercet-second", "tercet-third"
_SHORT_ID, _OTHER_ID, _LONG_ID = "a1b2c3d4e", "f5g6h7i8j", "call_0123456789abcdefghijklmn"
_ANSWER: Message = {"role": "assistant", "content": "x"}
_FILLERS = ("", "OK.")
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The form of Mistral's ids, which every template accepts."""
_RESULT_ROLES = ("tool", "observation", "environment", "ipython", "tool_response", "tool_result", "function")
"""Names of the role of results in templates, in order of preference. OLMo 3 and GLM-4-0414 have their own."""
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
    begins_with_user: bool = False
    """An answer at the beginning is refused, and taken after an empty user message."""
    after_results: str | None = None
    """Answer between results of tools and a user message, where the template takes none there without it."""
    one_call: bool = False
    """A message has one call at the most, and its result follows."""
    calls_alone: bool = False
    """Calls beside text are left out."""
    results: str = "tool"
    """Role of results of tools, by the template's name for it; "user" if the template has none."""
    short_call_ids: bool = False
    """Ids of tool calls have nine letters and digits."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Convert messages to a sequence that the template accepts. An accepted sequence is returned as it is."""
        shaped = [*messages]
        if self.calls_alone:
            shaped = [part for message in shaped for part in _without_text(message)]
        if self.one_call:
            shaped = list(_one_by_one(shaped))
        if self.results != "tool":
            shaped = [_as_result(message, self.results) if message["role"] == "tool" else message for message in shaped]
        if self.system is not SystemPlace.ANYWHERE or self.developer is not SystemPlace.ANYWHERE:
            shaped = self._with_one_system(shaped)
        if self.alternates:
            shaped = list(self._filled(_alternating(shaped)))
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

    def _filled(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Add the turns that the template needs between those that there are."""
        before = "system"
        for message in messages:
            role = message["role"]
            if role == "assistant" and before in ("system", "developer") and self.begins_with_user:
                yield {"role": "user", "content": ""}
            if role == "user" and before == "tool" and self.after_results is not None:
                yield {"role": "assistant", "content": self.after_results}
            before = role
            yield message


def find_shape(render: Render, *, knows_developer: bool) -> MessageShape:
    """Find the sequences that a template accepts, by rendering probes."""
    system = _system_place(render, "system")
    results = [PROBE_USER, _calling(_SHORT_ID), probe_result(_SHORT_ID, "x")]
    return MessageShape(
        begins_with_user=_needs(render, [], [{"role": "user", "content": ""}], [_ANSWER, PROBE_USER]),
        after_results=next(
            (text for text in _FILLERS if _needs(render, results, [{**_ANSWER, "content": text}], [PROBE_USER])), None
        ),
        system=system,
        developer=_system_place(render, "developer") if knows_developer else system,
        alternates=_refuses_neighbors(render),
        one_call=_renders_call(render, _SHORT_ID) and not _renders_calls(render) and _renders_calls(render, apart=True),
        calls_alone=_loses_call_beside_text(render),
        results=next((role for role in _RESULT_ROLES if _renders_result(render, role)), "user"),
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


def _needs(render: Render, head: list[Message], between: list[Message], tail: list[Message]) -> bool:
    """Return whether a template refuses these messages, and takes them with others between."""
    return render([*head, *tail]) is None and render([*head, *between, *tail]) is not None


def _needs_short_ids(render: Render) -> bool:
    """Return whether a template renders a call and its result with a short id and refuses them with a long one."""
    return _renders_call(render, _SHORT_ID) and not _renders_call(render, _LONG_ID)


def _renders_call(render: Render, call_id: str) -> bool:
    return _renders_texts(render, [PROBE_USER, _calling(call_id), probe_result(call_id, _FIRST)], _FIRST)


def _renders_result(render: Render, role: str) -> bool:
    results = ({**probe_result(call_id, _FIRST), "role": role} for call_id in (_SHORT_ID, _LONG_ID))
    return any(_renders_texts(render, [PROBE_USER, _calling(each["tool_call_id"]), each], _FIRST) for each in results)


def _renders_calls(render: Render, *, apart: bool = False) -> bool:
    """Return whether a template renders two calls and their results, together or one by one."""
    messages = [PROBE_USER, _calling(_SHORT_ID, _OTHER_ID), probe_result(_SHORT_ID, "x"), probe_result(_OTHER_ID, "x")]
    return _renders_texts(render, list(_one_by_one(messages)) if apart else messages, _SHORT_ID[::-1], _OTHER_ID[::-1])


def _loses_call_beside_text(render: Render) -> bool:
    """Return whether a template leaves out a call that has text beside it, and renders both apart."""
    call, result = _calling(_SHORT_ID), probe_result(_SHORT_ID, "x")
    beside = {**call, "content": _FIRST}
    if not _renders_texts(render, [PROBE_USER, call, result], _SHORT_ID[::-1]):
        return False
    if _renders_texts(render, [PROBE_USER, beside, result], _SHORT_ID[::-1]):
        return False
    return _renders_texts(render, [PROBE_USER, *_without_text(beside), result], _FIRST, _SHORT_ID[::-1])


def _renders_texts(render: Render, messages: Sequence[Message], *texts: str) -> bool:
    rendered = render(messages)
    return rendered is not None and all(text in rendered for text in texts)


def _calling(*call_ids: str) -> Message:
    """Return a message with calls; the argument of each is its id in reverse."""
    calls = [probe_call({"text": call_id[::-1]}, call_id) for call_id in call_ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _without_text(message: Message) -> list[Message]:
    """Move the text beside calls into a message of its own. Reasoning stays with the text, which follows it."""
    if not message.get("tool_calls") or not text_of(message):
        return [message]
    kept = {"role", "tool_calls"}
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    return [text, {key: value for key, value in message.items() if key in kept} | {"content": ""}]


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Generate messages with one call each, followed by its result. Text and reasoning stay with the first call."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: list[Message] = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            yield {**first, "tool_calls": [call]}
            yield from (result for result in results if result["tool_call_id"] == call["id"])
        known = {call["id"] for call in calls}
        yield from (result for result in results if result["tool_call_id"] not in known)


def _as_result(message: Message, role: str) -> Message:
    """Return the result of a tool in another role. The user says which tool it is of."""
    if role != "user":
        return {**message, "role": role}
    head = f"Result of {message['name']}:\n"
    if has_images(message):
        return {"role": "user", "content": [{"type": "text", "text": head}, *parts_of(message)]}
    return {"role": "user", "content": f"{head}{text_of(message) or ''}"}


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
    if any(map(has_images, messages)):
        return {**messages[0], "content": [part for message in messages for part in parts_of(message)]}
    texts = [text for text in map(text_of, messages) if text]
    return {**messages[0], "content": "\n\n".join(texts)}


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
