"""gpt-oss: messages of the harmony notation (`tercet.frontend.parsers.harmony`) that are addressed to `functions.name`.

The notation also separates reasoning: the analysis channel, including calls of the model's own tools in it, is
reasoning; every other message is text. Messages of one kind are joined with a line break. Arguments that stop being
JSON are emitted as they are written, up to the message's end.
"""

from tercet.frontend.parsers.harmony import ENDS, Header, read_messages
from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import Emit, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.json_calls.call_object import read_arguments


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read the messages of every channel."""
    said: set[Emit] = set()

    def content(header: Header) -> Steps[str]:
        if header.function is not None:
            return (yield from _read_call(reader, sink, header.function, tools))
        emit = sink.reasoning if header.channel == "analysis" else sink.text
        if emit in said:
            emit("\n")
        said.add(emit)
        return (yield from reader.until(ENDS, emit))

    yield from read_messages(reader, content, sink.text)


def _read_call(reader: Reader, sink: Sink, name: str, tools: Tools) -> Steps[str]:
    sink.start(name)
    yield from reader.peek_solid()
    if marker := (yield from reader.accept_any("<|call|>", "<|end|>")):
        sink.arguments("{}")
        sink.end()
        return marker
    if marker := (yield from read_arguments(reader, sink, ENDS, text=tools.is_custom(name))):
        return marker
    return (yield from reader.until(ENDS, sink.text))


FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>",
        suffix="<|call|>",
        separator="<|start|>assistant",
        trigger="<|channel|>commentary to=functions.",
        extra_begins=("<|channel|>", "<|start|>"),
        special_tokens=True,
    ),
    grammar=read,
    parses_reasoning=True,
)
