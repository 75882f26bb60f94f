"""Settings of the core, and its events."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from tercet.protocol.messages.messages import (
    AbortReq,
    ControlReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from tercet.protocol.messages.values import Grammar, LoRAAdapter


class PolicyName(StrEnum):
    """Order of waiting requests."""

    LPM = "lpm"
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


@dataclass(frozen=True)
class CoreConfig:
    """Settings of scheduling that an operator can choose."""

    policy: PolicyName = PolicyName.LPM
    token_budget: int = 2048
    """Maximum tokens computed in one step; running decodes come first and always fit."""
    max_queued: int = 4096
    """Number of waiting choices from which on new requests are rejected."""
    patience: int = 64
    """Number of steps in which later requests may overtake a waiting one before it goes first."""
    radix_cache: bool = True
    reserve: float = 0.7
    """Share of the remaining output of running requests for which admission reserves pages, at start."""
    reserve_floor: float = 0.1
    """Lower limit of the share, which falls while no choice is retracted."""
    draft_rows: int = 0
    """Rows up to which a step of decodes is filled with draft tokens: as many as cost little more than one."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_queued < 1 or self.patience < 1:
            raise ValueError("token_budget, max_queued and patience must be at least 1")
        if not 0 <= self.reserve_floor <= self.reserve <= 1:
            raise ValueError("reserve and reserve_floor must satisfy 0 <= reserve_floor <= reserve <= 1")
        if self.draft_rows < 0:
            raise ValueError("draft_rows must be at least 0")


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


Asked = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | AbortReq | ControlReq
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
