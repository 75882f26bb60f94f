"""Settings of the core."""

from enum import StrEnum

import msgspec


class PolicyName(StrEnum):
    """Order of waiting requests."""

    LPM = "lpm"
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


class CoreConfig(msgspec.Struct, frozen=True):
    """Settings of scheduling that an operator can choose."""

    policy: PolicyName = PolicyName.LPM
    token_budget: int = 2048
    """Maximum tokens computed in one step; running decodes come first and always fit."""
    max_queued: int = 4096
    """Number of waiting choices from which on new requests are rejected."""
    max_skips: int = msgspec.field(default=64, name="patience")
    """Number of steps in which later requests may overtake a waiting one before it goes first."""
    radix_cache: bool = True
    reserve: float = 0.7
    """Share of the remaining output of running requests for which admission reserves pages, at start."""
    reserve_floor: float = 0.1
    """Lower limit of the share, which falls while no choice is retracted."""
    protection: int = 8
    """Share of the token budget, as a divisor, that a tenant gets while choices of another tenant decode."""
    draft_rows: int = 0
    """Rows up to which a step of decodes is filled with draft tokens: as many as cost little more than one."""
    draft_by_cost: bool = False
    """Draft tokens only where measured times of steps and the acceptance of a choice show that it pays."""
    stages: int = 1
    """Pipeline stages of the executor. A choice with a token in flight is in no later plan, and plans share choices."""
    attention_ranks: int = 1
    """Ranks with slots and a KV cache of their own. The token budget and the capacity are those of each."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_queued < 1 or self.max_skips < 1 or self.protection < 1:
            raise ValueError("token_budget, max_queued, max_skips and protection must be at least 1")
        if not 0 <= self.reserve_floor <= self.reserve <= 1:
            raise ValueError("reserve and reserve_floor must satisfy 0 <= reserve_floor <= reserve <= 1")
        if self.draft_rows < 0:
            raise ValueError("draft_rows must be at least 0")
        if self.stages < 1 or (self.stages > 1 and self.draft_rows):
            raise ValueError("stages must be at least 1, and draft_rows 0 with several")
        if self.attention_ranks < 1 or (self.attention_ranks > 1 and self.stages > 1):
            raise ValueError("attention_ranks must be at least 1, and stages 1 with several")
