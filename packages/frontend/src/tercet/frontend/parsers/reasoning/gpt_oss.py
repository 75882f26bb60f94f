"""Reasoning of gpt-oss without tools: the analysis channel of harmony is reasoning, other messages are text.

Without tools there are no calls, so a message to a function is text. With tools, `tools/gpt_oss.py` reads both.
"""

from tercet.frontend.parsers.harmony import ENDS, Header, read_messages
from tercet.frontend.parsers.machine import Machine
from tercet.frontend.parsers.port import Parser, ReasoningFormat, ReasoningFraming
from tercet.frontend.parsers.reader import Emit, Reader, Steps
from tercet.frontend.parsers.sink import Sink


def _read(reader: Reader, sink: Sink) -> Steps[None]:
    said: set[Emit] = set()

    def content(header: Header) -> Steps[str]:
        emit = sink.reasoning if header.channel == "analysis" and header.function is None else sink.text
        if emit in said:
            emit("\n")
        said.add(emit)
        if header.function is not None:
            emit(header.written)
        marker = yield from reader.until(ENDS, emit)
        if header.function is not None and marker == "<|call|>":
            emit(marker)
        return marker

    yield from read_messages(reader, content, sink.text)


def _parser(prompt: str) -> Parser:  # noqa: ARG001
    return Machine(_read)


def _never(prompt: str) -> bool:  # noqa: ARG001
    """Return False: a prompt ends before the first header, so it neither opens nor closes a message of the answer."""
    return False


FORMAT = ReasoningFormat(
    framing=ReasoningFraming(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        repeats=True,
        turn="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
    parser=_parser,
    opened=_never,
    closed=_never,
    special_tokens=True,
)
