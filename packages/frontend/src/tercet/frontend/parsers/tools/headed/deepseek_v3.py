"""DeepSeek V3 and R1, and the shorter form of V3.1.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-R1 (a type, the name and a
fenced block of JSON) and of deepseek-ai/DeepSeek-V3.1 (the name and JSON). A missing fence is tolerated. Arguments that
stop being JSON are emitted as they are written, up to the call's end marker, as in vLLM's parsers.
"""

import re

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.headed.section import Header, Section, read_sections

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_NAME = re.compile(r"[^<\n{`]+")


def _fenced_header(reader: Reader) -> Steps[Header]:
    yield from reader.run(_NAME)  # "function"
    yield from reader.expect(_SEPARATOR)
    name = (yield from reader.run(_NAME)).strip()
    if not name:
        raise MalformedError
    yield from reader.peek_solid()
    if not (yield from reader.accept("```json")) and (yield from reader.peek()) != "{":
        raise MalformedError
    return name, None


def _plain_header(reader: Reader) -> Steps[Header]:
    name = (yield from reader.run(_NAME)).strip()
    yield from reader.expect(_SEPARATOR)
    if not name:
        raise MalformedError
    return name, None


_FENCED = Section((_BEGIN,), _CALL, _fenced_header, ("\n```" + _CALL_END, "```" + _CALL_END, _CALL_END), (_END,))
_PLAIN = Section((_BEGIN,), _CALL, _plain_header, (_CALL_END,), (_END,))


def read_v3(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and sections of fenced calls."""
    yield from read_sections(reader, sink, _FENCED, tools)


def read_v31(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and sections of plain calls."""
    yield from read_sections(reader, sink, _PLAIN, tools)


FORMAT = ToolFormat(
    framing=ToolFraming(
        begin=_BEGIN,
        prefix=f"{_CALL}function{_SEPARATOR}$name\n```json\n",
        suffix=f"\n```{_CALL_END}",
        separator="\n",
        end=_END,
        trigger=_BEGIN,
        extra_begins=(_CALL,),
        special_tokens=True,
    ),
    grammar=read_v3,
)
V31_FORMAT = ToolFormat(
    framing=ToolFraming(
        begin=_BEGIN,
        prefix=f"{_CALL}$name{_SEPARATOR}",
        suffix=_CALL_END,
        end=_END,
        trigger=_BEGIN,
        extra_begins=(_CALL,),
        special_tokens=True,
    ),
    grammar=read_v31,
)
