"""Apertus: a JSON array between `<|tools_prefix|>` and `<|tools_suffix|>`, each call an object keyed by its tool.

Source: the chat template of swiss-ai/Apertus-8B-Instruct-2509, which writes `[{"name": {...}}, ...]`.
"""

from tercet.frontend.parsers.json_scan import read_string
from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.reader import MAX_NAME_CHARS, MalformedError, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.json_calls.call_object import read_object
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"


def _read_call(reader: Reader, sink: Sink) -> Steps[None]:
    yield from reader.expect("{")
    yield from reader.peek_solid()
    name = yield from read_string(reader)
    yield from reader.peek_solid()
    yield from reader.expect(":")
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise MalformedError
    yield from read_object(reader, sink, name)
    yield from reader.peek_solid()
    yield from reader.accept("}")


FORMAT = ToolFormat(
    framing=ToolFraming(
        begin=f"{_BEGIN}[",
        prefix='{"$name": ',
        suffix="}",
        separator=", ",
        end=f"]{_END}",
        trigger=_BEGIN,
        special_tokens=True,
    ),
    grammar=marked_json((_BEGIN,), (_END,), _read_call),
)
