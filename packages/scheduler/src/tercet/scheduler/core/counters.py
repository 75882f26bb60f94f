"""Totals of the core since its start, for operators, and for tests that check that a case occurred."""

from dataclasses import dataclass


@dataclass
class CoreCounters:
    """Counters of one scheduler since its start."""

    steps: int = 0
    mixed_steps: int = 0
    """Steps with both decodes and prefills."""
    chunks: int = 0
    """Prefill rows that did not reach the end of their prompt."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache or computed by a leader, at first admission."""
    output_tokens: int = 0
    forced_tokens: int = 0
    """Output tokens that a grammar forced without a step of their own."""
    drafted_tokens: int = 0
    """Draft tokens, each verified beside the token before it."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    forks: int = 0
    copies: int = 0
    retractions: int = 0
    rejected: int = 0
    aborted: int = 0
    finished: int = 0
    ignored: int = 0
    """Ignored messages: aborts of unknown requests, old attempts."""
