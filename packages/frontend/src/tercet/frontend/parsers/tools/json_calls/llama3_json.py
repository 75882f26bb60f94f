"""Llama 3.1, 3.2 and 3.3: a bare JSON object with a name and parameters, perhaps after `<|python_tag|>`.

Source: the chat template of meta-llama/Llama-3.1-8B-Instruct, and the prompt formats of meta-llama/llama-models.
Several calls are separated by semicolons, as vLLM's and SGLang's parsers read them. If tools are known, only an object
with the name of a tool is a call; every other object, and code after the tag, is text.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.json_calls.call_object import BARE_CALL, BARE_SIGN, read_call

_TAG = "<|python_tag|>"
_BEGIN = Markers(_TAG, "{")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and calls."""
    while (yield from _find(reader, sink)):
        try:
            while True:
                yield from read_call(reader, sink, tools)
                reader.hold()
                yield from reader.peek_solid()
                if not (yield from reader.accept(";")):
                    break
                yield from reader.peek_solid()
                if (yield from reader.accept(_TAG)):
                    yield from reader.peek_solid()
        except MalformedError:
            pass  # the held characters are emitted as text
        sink.text(reader.release())


def _find(reader: Reader, sink: Sink) -> Steps[bool]:
    """Advance to the next possible beginning of a call, held and not consumed; return whether there is one."""
    while (yield from reader.find(_BEGIN, sink.text)):
        reader.hold(sign=BARE_SIGN)
        if (yield from reader.accept(_TAG)):
            reader.announce()
            yield from reader.peek_solid()
        if (yield from reader.peek()) == "{":
            return True
        sink.text(reader.release())
    return False


FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix='{"name": "$name", "parameters": ',
        suffix="}",
        separator="; ",
        trigger='{"name": "',
        extra_patterns=(BARE_CALL,),
        special_tokens=True,
    ),
    grammar=read,
)
