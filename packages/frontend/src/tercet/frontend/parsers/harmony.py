"""Harmony, the notation of gpt-oss: messages with a header that names role, channel and recipient.

Source: docs/format.md of openai/harmony. `<|start|>{header}<|message|>{content}` and one of `<|end|>`, `<|call|>` and
`<|return|>`; the prompt ends with `<|start|>assistant`, so the first header is already open. A message without an end
is ended by the next header. A header that the end of the output cuts off is dropped, because harmony's own parser
returns no message then. Characters outside of messages are text.
"""

import re
from collections.abc import Callable

import msgspec

from tercet.frontend.parsers.reader import Emit, MalformedError, Markers, Reader, Steps

_MAX_HEADER_CHARS = 1024
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_OPENERS = (_START, _CHANNEL)
_OPEN = Markers(_START, _CHANNEL, _MESSAGE)
_HEADER_ENDS = Markers(_MESSAGE, _START, "<|end|>", "<|call|>", "<|return|>")
ENDS = Markers("<|end|>", "<|call|>", "<|return|>", *_OPENERS)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Header(msgspec.Struct, frozen=True):
    """A message's header. `written` is the header as the model wrote it, with its markers."""

    written: str
    channel: str
    recipient: str | None

    @property
    def function(self) -> str | None:
        """The name of the client's tool that this message calls."""
        if self.recipient is None or not self.recipient.startswith("functions."):
            return None
        return self.recipient.removeprefix("functions.") or None


Content = Callable[[Header], Steps[str]]
"""Function that reads a message's content and the marker that ends it, and returns that marker."""


def read_messages(reader: Reader, content: Content, stray: Emit) -> Steps[None]:
    """Read all messages, one after the other, and emit text outside of messages to `stray`."""
    reader.hold("", _MAX_HEADER_CHARS)
    opener = yield from reader.accept_any(*_OPENERS, _MESSAGE, " to=")
    while True:
        if not opener:
            reader.commit()
            opener = yield from reader.until(_OPEN, stray)
            if not opener:
                return
            reader.hold(opener, _MAX_HEADER_CHARS)
        try:
            header = yield from _read_header(reader, opener)
        except MalformedError:
            stray(reader.release())
            opener = ""
            continue
        closer = (yield from content(header)) if header else ""
        opener = closer if closer in _OPENERS else ""
        reader.hold(opener, _MAX_HEADER_CHARS)


def _read_header(reader: Reader, opener: str) -> Steps[Header | None]:
    """Read the header after `opener`, which is held, through `<|message|>`; None if the output ends within it."""
    parts = [opener]
    marker = "" if opener != _MESSAGE else _MESSAGE
    if not marker:
        marker = yield from reader.until(_HEADER_ENDS, parts.append)
    if marker and marker != _MESSAGE:
        raise MalformedError
    reader.commit()
    if not marker:
        return None
    text = "".join(parts)
    channel = _CHANNEL_NAME.search(text)
    recipient = _RECIPIENT.search(text)
    return Header(
        written=text if opener == _MESSAGE else text + _MESSAGE,
        channel=channel.group(1) if channel else "final",
        recipient=recipient.group(1) if recipient else None,
    )
