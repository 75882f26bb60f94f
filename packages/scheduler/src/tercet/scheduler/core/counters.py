"""What the core has done since it started: for operators, and for tests that must know a case really happened."""

from dataclasses import dataclass


@dataclass
class CoreCounters:
    """Running totals."""

    steps: int = 0
    mixed_steps: int = 0
    """Steps with both decodes and prefills."""
    chunks: int = 0
    """Prefill rows that did not reach the end of their prompt."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache or a leader had, at first admission."""
    output_tokens: int = 0
    forced_tokens: int = 0
    """Output tokens that a grammar gave without a step of their own."""
    drafted_tokens: int = 0
    """Tokens that were assumed, to be checked beside the one before them."""
    accepted_tokens: int = 0
    """Those of them that were right."""
    forks: int = 0
    copies: int = 0
    retractions: int = 0
    rejected: int = 0
    aborted: int = 0
    finished: int = 0
    ignored: int = 0
    """Messages about nothing held: late aborts, old attempts."""
