"""Mistral: `[TOOL_CALLS]` before a JSON array of calls, or before each call as `name[ARGS]{...}`.

Source: mistral-common's instruct tokenizers: v3 and v7 write the array, v11 `name[CALL_ID]id[ARGS]{...}`, v13 omits
the id; the chat templates of mistralai/Mistral-7B-Instruct-v0.3 and mistralai/Mistral-Small-3.2-24B-Instruct-2506.
`[ARGS]` may be missing, as in vLLM's parser. Other characters after the marker are text, including the marker.
There is no end marker: arguments that stop being JSON leave the call open, and the rest is text.
"""

import re

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import read_blocks
from tercet.frontend.parsers.tools.json_calls.call_object import read_call, read_calls, read_object

_BEGIN = Markers("[TOOL_CALLS]")
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:  # noqa: ARG001
    """Read text and calls."""
    yield from read_blocks(reader, sink, _BEGIN, lambda _: _read_block(reader, sink))


def _read_block(reader: Reader, sink: Sink) -> Steps[None]:
    char = yield from reader.peek_solid()
    if char == "[":
        yield from read_calls(reader, sink)
    elif char == "{":
        yield from read_call(reader, sink)
    else:
        yield from _read_named(reader, sink)


def _read_named(reader: Reader, sink: Sink) -> Steps[None]:
    name = yield from reader.run(_NAME)
    call_id = None
    if (yield from reader.accept("[CALL_ID]")):
        call_id = yield from reader.run(_NAME)
    yield from reader.accept("[ARGS]")
    if not name:
        raise MalformedError
    yield from read_object(reader, sink, name, call_id or None)


FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix="[TOOL_CALLS]$name[ARGS]",
        suffix="",
        trigger="[TOOL_CALLS]",
        special_tokens=True,
        short_ids=True,
    ),
    grammar=read,
)
ARRAY_FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="[TOOL_CALLS] [",
        prefix='{"name": "$name", "arguments": ',
        suffix="}",
        separator=", ",
        end="]",
        trigger="[TOOL_CALLS]",
        special_tokens=True,
        short_ids=True,
    ),
    grammar=read,
)
