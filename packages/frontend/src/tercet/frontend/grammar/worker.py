"""`python -m tercet.frontend.grammar.worker`: compiles other people's grammars, and dies of them in a frontend's place.

A check that takes too much processor time is ended by the kernel (SIGPROF), one that takes too much memory by itself
(SIGABRT); the frontend sees which. The process ends when its input does.
"""

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tercet.frontend.grammar.pipe import LENGTH, Check, Verdict, Vocabulary, decode_order, framed
from tercet.protocol.values import Grammar, GrammarKind

MEMORY = 512 * 1024 * 1024
"""Bytes of address space a check may take beyond what the process has."""

_FIRST_OTHER = 3
"""Of the file descriptors, behind the standard ones."""
_LONGEST_ERROR = 400
_NOTHING = "it allows no answer"
_WALK = 32
"""Tokens of an answer that is begun on trial: much that cannot be followed shows in the first few."""
_WALK_SECONDS = 0.25
"""Processor time after which a walk is given up: what has come so far can be followed."""


def main() -> None:
    """Answer orders until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the frontend's business
    os.closerange(_FIRST_OTHER, os.sysconf("SC_OPEN_MAX"))  # uvloop hands down what the frontend listens on
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer: LLTokenizer | None = None
    while (data := _read(source)) is not None:
        error = ""
        match decode_order(data):
            case Vocabulary() as vocabulary:
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
        target.write(framed(Verdict(error=error)))
        target.flush()


def fault(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """What is wrong with a grammar, found by compiling it and beginning an answer; empty if nothing."""
    try:
        matcher = LLMatcher(tokenizer, source(grammar), log_level=0, limits=LLParserLimits(verbose_errors=False))
        stuck = not matcher.is_error() and _is_stuck(matcher)
    except BaseException as error:  # a panic in Rust is no Exception
        return f"it cannot be compiled ({type(error).__name__})"
    if matcher.is_error():
        return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_LONGEST_ERROR] or _NOTHING
    return _NOTHING if stuck else ""


def _is_stuck(matcher: LLMatcher) -> bool:
    """Whether an answer of tokens chosen by chance comes to where nothing is allowed; the matcher may have an error."""
    chance, end = random.Random(0), time.process_time() + _WALK_SECONDS  # noqa: S311
    for _ in range(_WALK):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or not mask:
            return True
        later = mask >> (skipped := chance.randrange(mask.bit_length()))
        skipped = chance.randrange(mask.bit_length())
        later = mask >> skipped
        matcher.consume_token(skipped + (later & -later).bit_length() - 1)
        if matcher.is_error() or matcher.is_stopped() or time.process_time() > end:
            break
    return False


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
