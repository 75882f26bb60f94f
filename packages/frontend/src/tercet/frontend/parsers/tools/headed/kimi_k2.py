"""Kimi K2: a section of calls, each headed by an id that names the tool, `functions.name:0`.

Source: docs/tool_call_guidance.md and the chat template of moonshotai/Kimi-K2-Instruct. The tool's result must carry
the same id, so the id is passed on unchanged. Section markers in the singular are read too, as in vLLM's parser.
Arguments that stop being JSON are emitted as they are written, up to the call's end marker.
"""

import re

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.headed.section import Header, Section, read_sections

_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"[^<]+")


def _header(reader: Reader) -> Steps[Header]:
    call_id = (yield from reader.run(_ID)).strip()
    yield from reader.expect(_ARGUMENTS)
    name = call_id.removeprefix("functions.").partition(":")[0].strip()
    if not name:
        raise MalformedError
    return name, call_id


_SECTION = Section(
    begins=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    call="<|tool_call_begin|>",
    header=_header,
    call_ends=("<|tool_call_end|>",),
    ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
)


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and sections of calls."""
    yield from read_sections(reader, sink, _SECTION, tools)


FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<|tool_calls_section_begin|>",
        prefix=f"<|tool_call_begin|>functions.$name:$index{_ARGUMENTS}",
        suffix="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
        extra_begins=("<|tool_call_section_begin|>", "<|tool_call_begin|>"),
        special_tokens=True,
    ),
    grammar=read,
)
