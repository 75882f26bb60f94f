"""Hermes, Qwen 2.5 and Qwen 3: a JSON object between `<tool_call>` tags.

Source: the chat templates of NousResearch/Hermes-2-Pro-Llama-3-8B, Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B.
A block without a call object is text. Several objects in one block are several calls; a missing `</tool_call>` or last
brace is tolerated. Arguments that stop being JSON are emitted as they are written, up to `</tool_call>`.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_object import read_call

_BEGIN = Markers("\n<tool_call>", "<tool_call>")
_END = Markers("\n</tool_call>", "</tool_call>")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:  # noqa: ARG001
    """Read text and blocks of calls."""
    while marker := (yield from reader.until(_BEGIN, sink.text)):
        reader.hold(marker)
        try:
            yield from _read_block(reader, sink)
        except MalformedError:
            sink.text(reader.release())
            if sink.open and (yield from reader.until(_END, sink.arguments)):
                sink.end()


def _read_block(reader: Reader, sink: Sink) -> Steps[None]:
    yield from reader.peek_solid()
    while True:
        yield from read_call(reader, sink)
        reader.hold()
        if (yield from reader.peek_solid()) != "{":
            break
    if (yield from reader.accept("</tool_call>")):
        reader.commit()
    else:
        sink.text(reader.release())


FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix='<tool_call>\n{"name": "$name", "arguments": ',
        suffix="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    ),
    grammar=read,
)
