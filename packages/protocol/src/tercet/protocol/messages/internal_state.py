"""Values of `InternalState`: the requests and the cached prefixes of a scheduler, without tokens or text."""

from enum import StrEnum

import msgspec


class ChoicePhase(StrEnum):
    """Work that a scheduler does for a choice."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class ChoiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that a scheduler holds: its identity, and numbers of tokens and pages."""

    frontend: str
    rid: str
    index: int = 0
    attempt: int = 0
    tenant: str = ""
    phase: ChoicePhase
    age: float
    """Seconds since its arrival at the scheduler."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that needed no computing when it first got a slot."""
    computed_tokens: int = 0
    """Tokens, from the start of the prompt, whose keys and values are planned or computed."""
    output_tokens: int = 0
    max_new_tokens: int = 0
    pages: int = 0
    shared_pages: int = 0
    """Those of its pages that belong to the prefix cache."""
    constrained: bool = False
    lora: bool = False


class PrefixRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the prefix cache's tree."""

    parent: int
    """Index of the parent in the same list; -1 for a node without a listed parent."""
    pages: int
    users: int = 0
    """Number of running choices that use this node or one below."""
    children: int = 0
    """Number of its children, of which the list may have fewer."""
