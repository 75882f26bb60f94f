"""Token counts as OpenAI reports them."""

from typing import Any

import orjson

from tercet.frontend.manager.generation import Generation


def usage(
    generation: Generation, output_tokens: int | None = None, *, reasoning_tokens: int = 0, ended: bool = True
) -> dict[str, Any]:
    """The `usage` object; a prompt counts once however many choices it has, and a prediction when all have `ended`."""
    output = generation.output_tokens if output_tokens is None else output_tokens
    details = {"reasoning_tokens": reasoning_tokens}
    if ended and (predicted := generation.prediction_tokens()):
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = predicted
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": generation.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "completion_tokens_details": details,
    }


def chunk_suffix(counts: dict[str, Any] | None, *, wanted: bool) -> bytes:
    """What ends a chunk behind its choices: null for counts that come later, nothing for a client that wants none."""
    return b'],"usage":' + orjson.dumps(counts) + b"}\n\n" if wanted else b"]}\n\n"
