"""`python -m tercet.frontend.structured_output.worker`: a killable process that compiles clients' grammars.

The frontend tells by its exit status if a check takes too much processor time or memory (`helper/limits.py`). The
process ends when its input ends.
"""

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tercet.frontend.helper.limits import detach, limit_memory, processor_time, unlimit_memory
from tercet.frontend.helper.pipe import encode_frame, read_frame
from tercet.frontend.structured_output.pipe import Check, GrammarVerdict, GrammarVocabulary, decode_order
from tercet.protocol.grammar_limits import MOST_FORCED, PARSER_LIMITS, SECONDS_PER_TOKEN
from tercet.protocol.messages.values import Grammar, GrammarKind

MEMORY = 512 * 1024 * 1024
"""Bytes of address space that a check may use beyond those the process has."""

_LONGEST_ERROR = 400
_NO_ANSWER = "it allows no answer"
_COSTLY = "finding out which tokens may come next takes too long: make it less ambiguous"
_FORCES = f"it leaves no choice about more than {MOST_FORCED} bytes of text at once"
_TRIAL_TOKENS = 128
"""Tokens of each trial answer: most grammars that cannot be followed, or cost too much, show it within them."""
_TRIAL_SECONDS = 0.5
"""Processor time after which a walk stops and counts as passed."""
_COST_WINDOW = 9
"""Tokens whose median cost is judged, because some tokens pay a one-time cost."""


def main() -> None:
    """Process orders until the input ends."""
    detach()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer: LLTokenizer | None = None
    while (data := read_frame(source)) is not None:
        error = ""
        match decode_order(data):
            case GrammarVocabulary() as vocabulary:
                unlimit_memory()
                tokenizer = LLTokenizer(
                    vocabulary.tokenizer_json.decode(), n_vocab=vocabulary.vocab_size, eos_token=vocabulary.eos or None
                )
                limit_memory(MEMORY)
            case Check() as check:
                assert tokenizer is not None
                with processor_time(check.seconds):
                    error = grammar_error(check.grammar, tokenizer)
        target.write(encode_frame(GrammarVerdict(error=error)))
        target.flush()


def grammar_error(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Return why a grammar cannot be followed, after compiling it and starting trial answers; empty if it can."""
    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, source(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            return _described(matcher)
        errors = (_trial_error(matcher.deep_copy(), choose) for choose in (_random_token, _repeated_token))
        return next(filter(None, errors), "")
    except BaseException as error:  # a panic in Rust is not an Exception
        return f"it cannot be compiled ({type(error).__name__})"


def _described(matcher: LLMatcher) -> str:
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())[:_LONGEST_ERROR] or _NO_ANSWER


Choose = Callable[[random.Random, int, int], int]
"""Function that picks one of the tokens of a mask, given the token before."""


def _random_token(chance: random.Random, mask: int, before: int) -> int:  # noqa: ARG001
    """Return the next allowed token after a random position."""
    skipped = chance.randrange(mask.bit_length())
    later = mask >> skipped
    return skipped + (later & -later).bit_length() - 1


def _repeated_token(chance: random.Random, mask: int, before: int) -> int:
    """Return the token before if it is allowed again, which gives ambiguous grammars the most readings."""
    return before if before >= 0 and mask >> before & 1 else _random_token(chance, mask, before)


def _trial_error(matcher: LLMatcher, choose: Choose) -> str:
    """Return why an answer of chosen tokens cannot continue, or continues at too high a cost; empty if it can."""
    chance, begun, token = random.Random(0), time.process_time(), -1  # noqa: S311
    costs: deque[float] = deque(maxlen=_COST_WINDOW)
    before = begun
    for _ in range(_TRIAL_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask and not matcher.is_error():
            return _NO_ANSWER
        if not matcher.is_error():
            matcher.consume_token(token := choose(chance, mask, token))
        if not matcher.is_error() and len(matcher.compute_ff_bytes()) > MOST_FORCED:
            return _FORCES
        if matcher.is_error():
            return _described(matcher)
        now = time.process_time()
        costs.append(now - before)
        before = now
        if len(costs) == _COST_WINDOW and median(costs) > SECONDS_PER_TOKEN:
            return _COSTLY
        if matcher.is_stopped() or now - begun > _TRIAL_SECONDS:
            break
    return ""


def source(grammar: Grammar) -> str:
    """Return a grammar in the form that llguidance takes."""
    compilers = {
        GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: LLMatcher.grammar_from_lark,
    }
    text: str = compilers[grammar.kind](grammar.text)
    return text


if __name__ == "__main__":
    main()
