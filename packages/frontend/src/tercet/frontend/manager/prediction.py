"""How much of what a client predicted is in the answer."""

from bisect import bisect_left
from collections.abc import Sequence

LONGEST = 32_768
"""Tokens of a prediction that are looked at."""
RUN = 3
"""Tokens in a row that must be equal for an output to be found again further on: a scheduler's guesses need as many."""


def predicted_tokens(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Tokens of a prediction that are in an output, in the same order.

    The output is followed through the prediction. Where they differ, it goes on at the next place of the prediction
    that has the output's next `RUN` tokens. This may miss tokens, but takes time that grows only as the texts do.
    """
    places: dict[tuple[int, ...], list[int]] | None = None
    found = at = 0
    for position, token in enumerate(output):
        if at >= len(prediction) or token != prediction[at]:
            if places is None:
                places = _places(prediction)
            known = places.get(tuple(output[position : position + RUN]), [])
            later = bisect_left(known, at)
            if later == len(known):
                continue
            at = known[later]
        found += 1
        at += 1
    return found


def _places(tokens: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Where each run of tokens begins."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(tokens) - RUN + 1):
        places.setdefault(tuple(tokens[place : place + RUN]), []).append(place)
    return places
