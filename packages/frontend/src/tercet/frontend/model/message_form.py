"""Form in which a chat template reads one message: its content, calls and reasoning, found by rendering probes.

Templates differ in what transformers leaves to the caller: content may be text or parts, arguments of calls objects or
JSON text, and reasoning has several names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tercet.frontend.model.template_syntax import to_json
from tercet.frontend.parsers.call_writer import write_calls
from tercet.frontend.parsers.registry import tool_format

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""Renders messages; None if the template refuses or fails."""
Escape = Callable[[str], str]

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking", "thought")
"""Names of a message's reasoning in templates. History has the first."""
_PROBE, _REASONING, _CONTENT = "tercet-probe", "tercet-reasoning", "tercet-content"
_PROBE_ID = "probe1234"
PROBE_USER: Message = {"role": "user", "content": "x"}
IMAGE: Message = {"type": "image"}
"""Part of a content in the place of an image, as transformers' processors give it to templates."""
SOUND: Message = {"type": "audio", "audio": ""}
"""The same of a sound. Templates look for the type or for the key."""
VIDEO: Message = {"type": "video"}
_MEDIA = (IMAGE, SOUND, VIDEO)
_OWN_KEYS = frozenset({"role", "content"})
_TEMPLATE_KEYS = frozenset(
    {
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "arguments",
        "id",
        "properties",
        "required",
        "items",
        "enum",
        "default",
        "title",
        "format",
        "additionalProperties",
        "anyOf",
        "allOf",
        "oneOf",
        "const",
        "$ref",
        "$defs",
        "nullable",
        "minimum",
        "maximum",
    }
)
"""Keys of tools, calls and schemas that templates look up; all other keys are client text."""


class CallForm(msgspec.Struct, frozen=True):
    """Form of a message with tool calls."""

    content: str | None
    """Content of a message that has only tool calls."""
    arguments_as_text: bool


class ReasoningForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form of a message with reasoning."""

    names: tuple[str, ...] = ()
    """Names that the template reads besides `reasoning_content`."""
    as_part: bool = False
    """Reasoning is a part of the content with the type "thinking"."""
    replaces_content: bool = False
    """In a message with calls, the template takes either reasoning or content."""
    only_with_calls: bool = False
    """The template leaves out the content of an answer that has reasoning and no calls."""


CALL_FORMS = [CallForm("", False), CallForm("", True), CallForm(None, False), CallForm(None, True)]
"""Candidates, in order of preference."""


class MessageForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form in which a template reads messages."""

    content_as_parts: bool = False
    calls: CallForm = CALL_FORMS[0]
    writes_calls: bool = True
    """The template renders calls; otherwise they are written into the content, in the model's own notation."""
    notation: str | None = None
    """Notation of calls that are written into the content."""
    reasoning: ReasoningForm = ReasoningForm()
    developer: str = "system"
    """Role of developer messages."""

    def convert(self, message: Message, escape: Escape) -> Message:
        """Convert a message, applying `escape` to every text of the client."""
        content = text_of(message)
        shaped = {key: value if key in _OWN_KEYS else escaped(value, escape) for key, value in message.items()}
        if message["role"] == "developer":
            shaped["role"] = self.developer
        if has_images(message):
            return {**shaped, "content": [_escaped_part(part, escape) for part in parts_of(message)]}
        text = escape(content) if content is not None else None
        if calls := shaped.get("tool_calls"):
            text = self._with_calls(shaped, calls, text)
        reasoning = shaped.get(REASONING_NAMES[0])
        if reasoning is not None:
            return self._with_reasoning(shaped, text, reasoning)
        return {**shaped, "content": self._content(text)}

    def _with_calls(self, shaped: Message, calls: list[Message], text: str | None) -> str | None:
        """Put the calls into the message; return its content."""
        if not self.writes_calls:
            del shaped["tool_calls"]
            return "\n".join(filter(None, (text, _written_calls(calls, self.notation))))
        if self.calls.arguments_as_text:
            shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return text or self.calls.content

    def _with_reasoning(self, shaped: Message, text: str | None, reasoning: str) -> Message:
        form, calls = self.reasoning, "tool_calls" in shaped
        if calls and form.replaces_content and text:
            text, reasoning = self.calls.content, f"{reasoning}\n\n{text}"
        if form.only_with_calls and not calls:
            del shaped[REASONING_NAMES[0]]
        elif form.as_part:
            del shaped[REASONING_NAMES[0]]
            parts = [{"type": "thinking", "thinking": reasoning}]
            return {**shaped, "content": [*parts, {"type": "text", "text": text}] if text else parts}
        else:
            shaped |= dict.fromkeys((REASONING_NAMES[0], *form.names), reasoning)
        return {**shaped, "content": self._content(text)}

    def _content(self, text: str | None) -> object:
        return [{"type": "text", "text": text}] if self.content_as_parts and text is not None else text


def find_form(render: Render, words: frozenset[str], notation: str | None) -> MessageForm:
    """Find the form of messages by rendering probes. `words` are the template's, see `ParsedTemplate`."""
    calls = next((form for form in CALL_FORMS if _renders_call(render, form)), None)
    form = MessageForm(
        content_as_parts=not _renders_text(render, _PROBE)
        and _renders_text(render, [{"type": "text", "text": _PROBE}]),
        calls=calls or CALL_FORMS[0],
        writes_calls=calls is not None,
        notation=notation,
        developer="developer" if "developer" in words else "system",
    )
    return msgspec.structs.replace(form, reasoning=_find_reasoning(render, form, words))


def _find_reasoning(render: Render, form: MessageForm, words: frozenset[str]) -> ReasoningForm:
    candidates = [ReasoningForm(names=tuple(name for name in REASONING_NAMES[1:] if name in words))]
    if "thinking" in words:
        candidates.append(ReasoningForm(as_part=True))
    for candidate in candidates:
        text = _rendered(render, form, candidate, _assistant("", calls=True))
        if text is not None and _REASONING in text:
            return _with_conflicts(render, form, candidate)
    for candidate in candidates:  # reasoning may be rendered in answers without calls only
        text = _rendered(render, form, candidate, _assistant(_CONTENT, calls=False))
        if text is not None and _REASONING in text and _CONTENT in text:
            return _with_conflicts(render, form, candidate)
    return _with_conflicts(render, form, candidates[0])


def _with_conflicts(render: Render, form: MessageForm, candidate: ReasoningForm) -> ReasoningForm:
    """Return the form with the places in which the template takes no reasoning beside content."""

    def conflicts(message: Message) -> bool:
        without = {key: value for key, value in message.items() if key != REASONING_NAMES[0]}
        alone, beside = (_rendered(render, form, candidate, each) for each in (without, message))
        return alone is not None and _CONTENT in alone and (beside is None or _CONTENT not in beside)

    return msgspec.structs.replace(
        candidate,
        replaces_content=conflicts(_assistant(_CONTENT, calls=True)),
        only_with_calls=conflicts(_assistant(_CONTENT, calls=False)),
    )


def _rendered(render: Render, form: MessageForm, reasoning: ReasoningForm, message: Message) -> str | None:
    """Render a message with reasoning in one form: in a tool loop if it has calls, otherwise in a finished turn."""
    tried = msgspec.structs.replace(form, reasoning=reasoning)
    last = probe_result() if "tool_calls" in message else PROBE_USER
    return render([tried.convert(each, str) for each in (PROBE_USER, message, last)])


def _assistant(content: str, *, calls: bool) -> Message:
    message: Message = {"role": "assistant", "content": content, REASONING_NAMES[0]: _REASONING}
    return {**message, "tool_calls": [probe_call({"text": _PROBE})]} if calls else message


def _renders_call(render: Render, form: CallForm) -> bool:
    """Return whether the template renders a call with its arguments when given this form."""
    arguments: object = to_json({"text": _PROBE}) if form.arguments_as_text else {"text": _PROBE}
    message = {"role": "assistant", "content": form.content, "tool_calls": [probe_call(arguments)]}
    text = render([PROBE_USER, message, probe_result()])
    # Doubly encoded JSON or a Python repr is not the format that the model was trained on.
    return text is not None and _PROBE in text and '\\"text' not in text and "'text'" not in text


def _renders_text(render: Render, content: object) -> bool:
    """Return whether the template renders the text of a user message with this content."""
    text = render([{"role": "user", "content": content}])
    return text is not None and _PROBE in text and "'type'" not in text


def probe_call(arguments: object, call_id: str = _PROBE_ID) -> Message:
    """Return a call for probes."""
    return {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}


def probe_result(call_id: str = _PROBE_ID, text: str = "x") -> Message:
    """Return the result of a call for probes."""
    return {"role": "tool", "content": text, "name": "probe", "tool_call_id": call_id}


def text_of(message: Message) -> str | None:
    """Return the text of a message's content."""
    content = message.get("content")
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content


def _escaped_part(part: Message, escape: Escape) -> Message:
    return part if part in _MEDIA else {"type": "text", "text": escape(part["text"])}


def has_images(message: Message) -> bool:
    """Return whether the content of a message has images, sounds or clips."""
    content = message.get("content")
    return isinstance(content, list) and any(part in _MEDIA for part in content)


def parts_of(message: Message) -> list[Message]:
    """Return the content of a message as parts, without empty ones."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [part for part in parts if part in _MEDIA or part.get("text")]


def escaped(value: Any, escape: Escape) -> Any:
    """Apply `escape` to every text of the client in a value."""
    match value:
        case str():
            return escape(value)
        case dict():
            return {key if key in _TEMPLATE_KEYS else escape(key): escaped(each, escape) for key, each in value.items()}
        case list():
            return [escaped(each, escape) for each in value]
    return value


def _written_calls(calls: Sequence[Message], notation: str | None) -> str:
    """Return calls as a model writes them: a JSON array if the model has no notation."""
    functions = (call["function"] for call in calls)
    framing = tool_format(notation or "generic").framing
    return write_calls(framing, ((function["name"], function["arguments"]) for function in functions))


def _with_text_arguments(call: Message) -> Message:
    """Return the call with its arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": to_json(function["arguments"])}}
