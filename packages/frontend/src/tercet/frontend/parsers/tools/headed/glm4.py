"""GLM-4 of 2024 and GLM-4-0414: the name of a tool on a line of its own, then a JSON object.

Source: the chat templates of zai-org/glm-4-9b-chat-hf and zai-org/GLM-4-9B-0414, and the demo server of THUDM/GLM-4,
which reads a call where the first line is the name of a tool and the second begins with `{`. Only names of known tools
at the start of a line are calls. The token that ends the turn ends the call.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.json_calls.call_object import read_object

_LINE = Markers("\n")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and calls."""
    names = tools.names
    lead = ""
    while True:
        reader.hold(lead, sign="")
        try:
            yield from _read_call(reader, sink, names)
        except MalformedError:
            sink.text(reader.release())
        lead = yield from reader.until(_LINE, sink.text)
        if not lead:
            return


def _read_call(reader: Reader, sink: Sink, names: tuple[str, ...]) -> Steps[None]:
    name = yield from reader.accept_any(*names)
    if not name:
        if (yield from reader.peek()) and reader.cut_within(*names):
            reader.commit()
        raise MalformedError
    reader.announce()
    yield from reader.expect("\n")
    yield from read_object(reader, sink, name)


FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix="$name\n",
        suffix="",
        separator="\n",
        trigger="$name\n",
        line_start=True,
        special_tokens=True,
    ),
    grammar=read,
)
