"""The core's settings and the events it takes."""

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
    """How waiting requests are ordered."""

    LPM = "lpm"
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


@dataclass(frozen=True)
class CoreConfig:
    """What an operator can choose about scheduling."""

    policy: PolicyName = PolicyName.LPM
    token_budget: int = 2048
    """Most tokens computed in one step; running decodes come first and always fit."""
    max_queued: int = 4096
    """Waiting choices past which new requests are refused."""
    patience: int = 64
    """Steps a waiting request can be passed over by later ones before it goes first."""
    radix_cache: bool = True
    reserve: float = 0.7
    """Share of the output still allowed to running requests that admission sets pages aside for, at start."""
    reserve_floor: float = 0.1
    """The share falls towards this while nothing has to be retracted."""
    draft_rows: int = 0
    """Rows up to which a step of decodes is filled with assumed tokens: as many as cost little more than one."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_queued < 1 or self.patience < 1:
            raise ValueError("token_budget, max_queued and patience must be at least 1")
        if not 0 <= self.reserve_floor <= self.reserve <= 1:
            raise ValueError("reserve and reserve_floor must satisfy 0 <= reserve_floor <= reserve <= 1")
        if self.draft_rows < 0:
            raise ValueError("draft_rows must be at least 0")


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """A peer is down: free what it asked for."""

    peer: str


class PeerBlocked(msgspec.Struct, frozen=True, tag=True):
    """A peer's queue is full: plan nothing whose output goes there."""

    peer: str


class PeerDrained(msgspec.Struct, frozen=True, tag=True):
    """A blocked peer takes messages again."""

    peer: str


class GrammarPending(msgspec.Struct, frozen=True, tag=True):
    """A grammar is being read: admit no choice that follows it, or all others would wait with its first step."""

    grammar: Grammar


class GrammarRead(msgspec.Struct, frozen=True, tag=True):
    """A grammar that was pending is no more; with a `fault`, refuse what would follow it."""

    grammar: Grammar
    fault: str = ""


class MaskReady(msgspec.Struct, frozen=True, tag=True):
    """The choice in a slot, whose mask was late in a step, can be planned again."""

    slot: int
    step: int


class AdapterPending(msgspec.Struct, frozen=True, tag=True):
    """An adapter is being read: admit no choice that has it."""

    adapter: LoRAAdapter


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """An adapter was asked for and is read; with a `fault`, refuse what would have it."""

    adapter: LoRAAdapter
    fault: str = ""
    sha256: str = ""
    """Of its files."""


class WeightsRead(msgspec.Struct, frozen=True, tag=True):
    """Weights that were asked for have been looked at; with a `fault`, they cannot be loaded."""

    path: str
    fault: str = ""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """The scheduler is leaving: finish what is held, refuse the rest."""


Asked = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | AbortReq | ControlReq
"""What frontends ask of a core, of whichever kind: each answers also what only the other can do."""
Obstacle = PeerBlocked | PeerDrained | GrammarPending | GrammarRead | MaskReady | AdapterPending | AdapterRead
"""Events by which choices must not be planned for now, and those by which they may be again."""
CoreMessage = Asked | PeerGone | Obstacle | WeightsRead | Drain


class Arrival(NamedTuple):
    """A message and the peer it came from."""

    source: str
    message: CoreMessage
    at: float = 0.0
    """When it came, by the clock that `schedule` is told the time of."""
