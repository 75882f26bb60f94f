"""Predicted outputs: the tokens of a client's prediction that the output accepted."""

from bisect import bisect_left
from collections.abc import Sequence

from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ServedModel

MAX_PREDICTION_TOKENS = 32_768
"""Maximum number of tokens of a prediction that are compared."""
RUN = 3
"""Consecutive equal tokens needed to realign the output with the prediction; the n-gram drafter needs as many."""


async def prediction_of(request: GenerateRequest, model: ServedModel) -> Sequence[int]:
    """Tokenize the predicted output. Raises ApiError."""
    if not request.options.prediction:
        return ()
    text = TextPrompt(request.options.prediction, add_special_tokens=False, param="prediction")
    return (await model.tokenize(text, must_fit=False))[:MAX_PREDICTION_TOKENS]


def predicted_tokens(prediction: Sequence[int], output: Sequence[int]) -> int:
    """Return the number of predicted tokens that occur in the output in the same order.

    The output is followed through the prediction. At a mismatch, matching continues at the next position of the
    prediction that has the output's next `RUN` tokens. This may miss tokens, but its cost is linear in both lengths.
    """
    starts: dict[tuple[int, ...], list[int]] | None = None
    found = at = 0
    for position, token in enumerate(output):
        if at >= len(prediction) or token != prediction[at]:
            if starts is None:
                starts = _run_starts(prediction)
            known = starts.get(tuple(output[position : position + RUN]), [])
            later = bisect_left(known, at)
            if later == len(known):
                continue
            at = known[later]
        found += 1
        at += 1
    return found


def _run_starts(tokens: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Return the start positions of each run of `RUN` tokens."""
    starts: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(tokens) - RUN + 1):
        starts.setdefault(tuple(tokens[place : place + RUN]), []).append(place)
    return starts
