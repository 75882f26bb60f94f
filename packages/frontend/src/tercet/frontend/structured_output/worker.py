"""`python -m tercet.frontend.structured_output.worker`: a killable process that compiles clients' grammars.

A check that takes too much processor time is ended by the kernel (SIGPROF), one that takes too much memory by itself
(SIGABRT); the frontend sees which. The process ends when its input does.
"""

import os
import random
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tercet.frontend.structured_output.pipe import (
    LENGTH,
    Check,
    GrammarVerdict,
    GrammarVocabulary,
    decode_order,
    framed,
)
from tercet.protocol.grammar_limits import MOST_FORCED, PARSER_LIMITS, SECONDS_PER_TOKEN
from tercet.protocol.messages.values import Grammar, GrammarKind

MEMORY = 512 * 1024 * 1024
"""Bytes of address space a check may take beyond what the process has."""

_FIRST_OTHER = 3
"""Of the file descriptors, behind the standard ones."""
_LONGEST_ERROR = 400
_NOTHING = "it allows no answer"
_COSTLY = "finding out which tokens may come next takes too long: make it less ambiguous"
_FORCES = f"it leaves no choice about more than {MOST_FORCED} bytes of text at once"
_WALK = 128
"""Tokens of each answer that is begun on trial: much that cannot be followed, or costs too much, shows in the first."""
_WALK_SECONDS = 0.5
"""Processor time after which a walk is given up: what has come so far can be followed."""
_JUDGED = 9
"""Tokens whose median cost is judged: some pay for what is made once."""


def main() -> None:
    """Answer orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the frontend's business
    os.closerange(_FIRST_OTHER, os.sysconf("SC_OPEN_MAX"))  # uvloop hands down what the frontend listens on
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer: LLTokenizer | None = None
    while (data := _read(source)) is not None:
        error = ""
        match decode_order(data):
            case GrammarVocabulary() as vocabulary:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                tokenizer = LLTokenizer(
                    vocabulary.tokenizer_json.decode(), n_vocab=vocabulary.vocab_size, eos_token=vocabulary.eos or None
                )
                _bound_memory()
            case Check() as check:
                assert tokenizer is not None
                signal.setitimer(signal.ITIMER_PROF, check.seconds)
                error = fault(check.grammar, tokenizer)
                signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(framed(GrammarVerdict(error=error)))
        target.flush()


def fault(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return why a grammar cannot be followed, found by compiling it and beginning answers; empty if it can."""
    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            return _described(matcher)
        return next(filter(None, (_walk_fault(matcher.deep_copy(), choose) for choose in (_at_random, _again))), "")
    except BaseException as error:  # a panic in Rust is no Exception
        return f"it cannot be compiled ({type(error).__name__})"


def _described(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_LONGEST_ERROR] or _NOTHING


Choose = Callable[[random.Random, int, int], int]
"""Picks one of the tokens of a mask, given the token before."""


def _at_random(chance: random.Random, mask: int, before: int) -> int:  # noqa: ARG001
    """Pick the next token allowed behind a place chosen by chance."""
    skipped = chance.randrange(mask.bit_length())
    later = mask >> skipped
    return skipped + (later & -later).bit_length() - 1


def _again(chance: random.Random, mask: int, before: int) -> int:
    """Pick the token before, where it may come again: of ambiguous grammars that gives the most readings."""
    return before if before >= 0 and mask >> before & 1 else _at_random(chance, mask, before)


def _walk_fault(matcher: LLMatcher, choose: Choose) -> str:
    """Return why an answer of chosen tokens cannot go on, or goes on at too high a cost; empty if it can."""
    chance, begun, token = random.Random(0), time.process_time(), -1  # noqa: S311
    costs: deque[float] = deque(maxlen=_JUDGED)
    before = begun
    for _ in range(_WALK):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask and not matcher.is_error():
            return _NOTHING
        if not matcher.is_error():
            matcher.consume_token(token := choose(chance, mask, token))
        if not matcher.is_error() and len(matcher.compute_ff_bytes()) > MOST_FORCED:
            return _FORCES
        if matcher.is_error():
            return _described(matcher)
        now = time.process_time()
        costs.append(now - before)
        before = now
        if len(costs) == _JUDGED and median(costs) > SECONDS_PER_TOKEN:
            return _COSTLY
        if matcher.is_stopped() or now - begun > _WALK_SECONDS:
            break
    return ""


def source(grammar: Grammar) -> str:
    """A grammar as llguidance takes it."""
    compilers = {
        GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: LLMatcher.grammar_from_lark,
    }
    text: str = compilers[grammar.kind](grammar.text)
    return text


def _bound_memory() -> None:
    """Where the system tells how much the process has now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _read(source: BinaryIO) -> bytes | None:
    """The next order; None at the end."""
    head = source.read(LENGTH)
    if len(head) < LENGTH:
        return None
    data = source.read(size := int.from_bytes(head, "little"))
    return data if len(data) == size else None


if __name__ == "__main__":
    main()
