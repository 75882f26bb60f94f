"""Crash dump: the last events of the core, written when the scheduler dies or is asked to."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import Grammar, SamplingParams
from tercet.protocol.system.private_files import make_private_directory, open_private, remove_oldest
from tercet.scheduler.core.events import GrammarRead
from tercet.scheduler.core.plan import Plan, SlotInit, StepResult
from tercet.scheduler.diagnostics.event_log import Event, Excerpt, Handled, Scheduled

logger = logging.getLogger(__name__)

_MOST_EVENTS = 300
"""Events that are kept: about 100 steps. A supervisor waits only half a second for a hung scheduler's dump."""
_MOST_BYTES = 16 * 1024 * 1024
"""Bytes of requests that these events keep in memory: clients choose their sizes."""
_MOST_FILES = 8
"""Dumps that are kept."""

_BLANKS: Mapping[type[Any], Mapping[str, Callable[[Any], Any]]] = {
    Grammar: {"text": lambda _: ""},
    Plan: {"draft_tokens": lambda tokens: dict.fromkeys(tokens, 0)},
    StepResult: {
        "token_ids": lambda tokens: [min(token, 0) for token in tokens],
        "errors": lambda errors: dict.fromkeys(errors, ""),
    },
    TokenizedGenerateReqInput: {"cache_salt": lambda _: "", "tenant": lambda _: ""},
    SamplingParams: {
        "stop_token_ids": lambda tokens: [0] * len(tokens),
        "logit_bias": lambda biases: dict.fromkeys(range(len(biases)), 0.0),
    },
    SlotInit: {"suppressed_ids": lambda tokens: [0] * len(tokens)},
    GrammarRead: {"fault": lambda _: ""},
}
"""Redacted fields besides those of bytes: fields that contain tokens or text, with functions that replace them."""


class EventRing:
    """The last events of a core. `record` is called by the loop's thread, `write` by any."""

    def __init__(self, state: Callable[[], Path], peer: str, *, redacted: bool) -> None:
        """Create it. `state` returns the state directory, or raises ValueError."""
        self._state = state
        self._peer = peer
        self._redacted = redacted
        self._started: Event | None = None
        self._recorded = 0
        self._events: deque[tuple[Event, int]] = deque()
        """Events, and the bytes of requests in each."""
        self._bytes = 0

    def record(self, event: Event) -> None:
        """Keep an event; the first, with the settings of the core, is kept for good."""
        if self._started is None:
            self._started = event
        else:
            size = _request_bytes(event)
            self._recorded += 1
            self._events.append((event, size))
            self._bytes += size
            while len(self._events) > _MOST_EVENTS or self._bytes > _MOST_BYTES:
                self._bytes -= self._events.popleft()[1]

    def write(self, reason: str) -> None:
        """Write the events to a new file, of which the last are kept. Log an error if that fails."""
        events = [event for event, _ in self._events.copy()]
        if self._started is None:
            return
        head: list[Event] = [self._started]
        if self._redacted or self._recorded > len(events):
            head.append(Excerpt(self._recorded - len(events), self._redacted, reason))
        encoder = msgspec.json.Encoder()
        try:
            directory = self._state() / "crashes"
            make_private_directory(directory)
            prefix = self._peer.replace("/", "_")
            name = f"{prefix}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.jsonl"
            for stale in directory.glob(f"{prefix}-*.unfinished"):  # a process was killed
                if f"-{os.getpid()}." not in stale.name:
                    stale.unlink(missing_ok=True)
            unfinished = directory / f"{name}.unfinished"
            with os.fdopen(open_private(unfinished, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                for event in (*head, *events):
                    file.write(encoder.encode(redacted(event) if self._redacted else event) + b"\n")
            unfinished.rename(directory / name)
        except (OSError, ValueError) as error:
            logger.error("crash dump: not written: error=%s", error)
        else:
            logger.error("crash dump: written path=%s events=%d", directory / name, len(events))
            remove_oldest(directory, "*.jsonl", _MOST_FILES)


def _request_bytes(event: Event) -> int:
    """Return the bytes of prompts, outputs and grammars in an event."""
    if isinstance(event, Scheduled):
        return sum(len(init.tokens) for init in event.plan.introduce) if event.plan else 0
    if not isinstance(event, Handled):
        return 0
    size = 0
    for _, message, _ in event.arrivals:
        if isinstance(message, TokenizedGenerateReqInput):
            grammar = message.sampling.grammar
            size += len(message.input_ids) + len(message.prediction) + len(message.decode_spec)
            size += sum(len(resume.output_ids) for resume in message.resume) + (len(grammar.text) if grammar else 0)
    return size


def redacted(value: Any) -> Any:
    """Return a copy of an event, or of a part of one, without tokens and text. Lengths stay."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(len(value))
    if isinstance(value, msgspec.Struct):
        blanks = _BLANKS.get(type(value), {})
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return type(value)(**{name: blanks.get(name, redacted)(each) for name, each in fields.items()})
    if isinstance(value, dict):
        return {key: redacted(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        blanks = _BLANKS.get(type(value), {})
        return type(value)(*(blanks.get(name, redacted)(each) for name, each in zip(value._fields, value, strict=True)))
    return [*map(redacted, value)] if isinstance(value, list) else value
