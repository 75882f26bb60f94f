"""Reasoning between two tags at the start of an answer: the parser for most models, each with tags of its own."""

import re
from functools import partial

import msgspec

from tercet.frontend.parsers.machine import Machine
from tercet.frontend.parsers.port import Parser, ReasoningFormat, ReasoningFraming
from tercet.frontend.parsers.reader import Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink

_BREAKS = re.compile(r"\n+")


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """One model's tags."""

    begin: str
    end: str
    always: bool = False
    """Without a tag at the end of the prompt, the answer begins with reasoning all the same."""
    also_ends: tuple[str, ...] = ()
    """Markers that end reasoning although its end tag is missing, and belong to what follows."""
    special_tokens: bool = False


def tagged(tags: Tags) -> ReasoningFormat:
    """The format of reasoning between these tags.

    Templates write `begin`, a line break, the reasoning, a line break, `end`, and line breaks before the answer: none
    of these is part of either. The begin tag may be at the end of the prompt, or the model writes it, or both; only
    at the start does it count. Reasoning that is never closed is reasoning to the end.
    """
    return ReasoningFormat(
        framing=ReasoningFraming(begin=tags.begin, end=tags.end, also_ends=tags.also_ends),
        parser=partial(_parser, tags),
        opened=partial(opened, tags),
        closed=partial(closed, tags),
        special_tokens=tags.special_tokens,
    )


def opened(tags: Tags, prompt: str) -> bool:
    """Whether an answer to this prompt begins within reasoning. Only the prompt's end is needed."""
    tail = prompt.rstrip()
    return tail.endswith(tags.begin) or (tags.always and not tail.endswith(tags.end))


def closed(tags: Tags, prompt: str) -> bool:
    """Whether the prompt has ended the reasoning already."""
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
    else:
        sink.text(blank)
    if is_open:
        ends = Markers("\n" + tags.end, tags.end, *tags.also_ends)
        marker = yield from reader.until(ends, sink.reasoning)
        if marker in tags.also_ends:
            sink.text(marker)
        else:
            yield from reader.run(_BREAKS, None)
    yield from reader.rest(sink.text)


FORMAT = tagged(Tags(begin="<think>", end="</think>"))
