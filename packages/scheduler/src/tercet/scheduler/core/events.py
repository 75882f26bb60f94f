"""Events of the core: messages of frontends, and reports of the loop."""

from typing import NamedTuple

import msgspec

from tercet.protocol.messages.encodings import EncodeMediaReq
from tercet.protocol.messages.messages import (
    AbortReq,
    ControlReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from tercet.protocol.messages.values import Grammar, LoRAAdapter


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """Event: a peer is down, and the requests it sent must be dropped."""

    peer: str


class PeerBlocked(msgspec.Struct, frozen=True, tag=True):
    """Event: a peer's queue is full, and nothing must be planned whose output goes there."""

    peer: str


class PeerDrained(msgspec.Struct, frozen=True, tag=True):
    """Event: a blocked peer accepts messages again."""

    peer: str


class GrammarPending(msgspec.Struct, frozen=True, tag=True):
    """Event: a grammar is being read.

    Choices with it are not admitted, or all others would wait with its first step.
    """

    grammar: Grammar


class GrammarRead(msgspec.Struct, frozen=True, tag=True):
    """Event: a pending grammar is read. With a `fault`, requests with it are rejected."""

    grammar: Grammar
    fault: str = ""


class MaskReady(msgspec.Struct, frozen=True, tag=True):
    """Event: the choice in a slot, whose mask was late in a step, can be planned again."""

    slot: int
    step: int


class AdapterPending(msgspec.Struct, frozen=True, tag=True):
    """Event: an adapter is being read, and choices with it are not admitted."""

    adapter: LoRAAdapter


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """Event: a requested adapter is read. With a `fault`, requests with it are rejected."""

    adapter: LoRAAdapter
    fault: str = ""
    sha256: str = ""
    """Hash of the adapter's files."""


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """Event: requested weights were checked. With a `fault`, they cannot be loaded."""

    path: str
    fault: str = ""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Event: the scheduler is leaving. It finishes held requests and rejects others."""


class MediaReceived(msgspec.Struct, frozen=True, tag=True):
    """Event: an image or sound to encode has arrived, with its array."""

    request: EncodeMediaReq
    frames: tuple[memoryview, ...]

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def attempt(self) -> int:
        return self.request.attempt


Asked = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | MediaReceived | AbortReq | ControlReq
"""Messages of frontends. Both cores handle all of them, if only by a rejection."""
Obstacle = PeerBlocked | PeerDrained | GrammarPending | GrammarRead | MaskReady | AdapterPending | AdapterRead
"""Events that block choices from being planned, and those that unblock them."""
CoreMessage = Asked | PeerGone | Obstacle | WeightsRead | Drain


class Arrival(NamedTuple):
    """A message and the peer it came from."""

    source: str
    message: CoreMessage
    at: float = 0.0
    """Arrival time, on the clock of the `now` of `schedule`."""
