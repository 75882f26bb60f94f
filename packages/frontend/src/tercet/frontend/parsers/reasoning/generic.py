"""Reasoning between two tags at the start of an answer: the parser of most models, each with tags of its own."""

import re
from functools import partial

import msgspec

from tercet.frontend.parsers.machine import Machine
from tercet.frontend.parsers.port import Parser, ReasoningFormat, ReasoningFraming
from tercet.frontend.parsers.reader import Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink

_BREAKS = re.compile(r"\n+")


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning tags of one model."""

    begin: str
    end: str
    always: bool = False
    """The answer begins with reasoning even if the prompt does not end with a tag."""
    extra_ends: tuple[str, ...] = ()
    """Markers that end reasoning if its end tag is missing. They belong to the text after it."""
    opened_by: tuple[str, ...] = ()
    """Ends of a prompt, besides `begin`, that have opened the reasoning."""
    answer: tuple[str, str] | None = None
    """Tags around the answer, which belong to no part of it. They may be missing."""
    special_tokens: bool = False


def tagged(tags: Tags) -> ReasoningFormat:
    """Return the format of reasoning between these tags.

    Templates write `begin`, a line break, the reasoning, a line break, `end`, and line breaks before the answer; these
    line breaks belong to neither. The prompt, the model or both write the begin tag; it counts only at the start of the
    answer. Reasoning without an end tag lasts to the end of the answer.
    """
    return ReasoningFormat(
        framing=ReasoningFraming(begin=tags.begin, end=tags.end, extra_ends=tags.extra_ends),
        parser=partial(_parser, tags),
        opened=partial(opened, tags),
        closed=partial(closed, tags),
        special_tokens=tags.special_tokens,
    )


def opened(tags: Tags, prompt: str) -> bool:
    """Return whether an answer to this prompt begins inside reasoning. Only the prompt's end is needed."""
    tail = prompt.rstrip()
    return tail.endswith((tags.begin, *tags.opened_by)) or (tags.always and not tail.endswith(tags.end))


def closed(tags: Tags, prompt: str) -> bool:
    """Return whether the prompt has closed the reasoning already."""
    return prompt.rstrip().endswith(tags.end)


def _parser(tags: Tags, prompt: str) -> Parser:
    return Machine(lambda reader, sink: _read(reader, sink, tags, is_open=opened(tags, prompt)))


def _read(reader: Reader, sink: Sink, tags: Tags, *, is_open: bool) -> Steps[None]:
    blank = yield from reader.spaces()
    if (yield from reader.accept(tags.begin)):
        is_open = True
        yield from reader.run(_BREAKS, None)
    elif is_open:
        sink.reasoning(blank.lstrip("\n"))
    if is_open:
        ends = Markers("\n" + tags.end, tags.end, *tags.extra_ends)
        marker = yield from reader.until(ends, sink.reasoning)
        if marker in tags.extra_ends:
            sink.text(marker)
        else:
            yield from reader.run(_BREAKS, None)
        blank = ""
    if tags.answer is not None:
        blank += yield from reader.spaces()
        if (yield from _read_answer(reader, sink, *tags.answer)):
            blank = ""
    sink.text(blank)
    yield from reader.rest(sink.text)


def _read_answer(reader: Reader, sink: Sink, begin: str, end: str) -> Steps[bool]:
    """Read the answer between its tags, through the end tag, and return whether there was one.

    An end tag before more text is text; one before another tag is not.
    """
    if not (yield from reader.accept(begin)):
        return False
    yield from reader.run(_BREAKS, None)
    ends = Markers.with_breaks(end)
    while marker := (yield from reader.until(ends, sink.text)):
        reader.hold(marker)
        if (yield from reader.peek_solid()) in ("", "<"):
            reader.commit()
            break
        sink.text(reader.release())
    return True


FORMAT = tagged(Tags(begin="<think>", end="</think>"))
