"""Token counts as OpenAI reports them."""

from typing import Any

import orjson

from tercet.frontend.manager.inputs.images import images_in, sounds_in
from tercet.frontend.manager.req_state import Generation


def usage(
    generation: Generation, output_tokens: int | None = None, *, reasoning_tokens: int = 0, ended: bool = True
) -> dict[str, Any]:
    """Return the `usage` object.

    A prompt counts once for all its choices. A prediction counts once all choices have `ended`.
    """
    output = generation.output_tokens if output_tokens is None else output_tokens
    details = {"reasoning_tokens": reasoning_tokens}
    if ended and (predicted := generation.prediction_tokens()):
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = predicted
    of_prompt = {"cached_tokens": generation.cached_tokens}
    places = [place for state in generation.states for place in state.places]
    images, groups = ([each for each in images_in(places) if bool(each.frames) is of_clip] for of_clip in (False, True))
    for kind, own in (("image_tokens", images), ("video_tokens", groups), ("audio_tokens", sounds_in(places))):
        if own:
            of_prompt[kind] = sum(place.tokens for place in own)
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": generation.prompt_tokens + output,
        "prompt_tokens_details": of_prompt,
        "completion_tokens_details": details,
    }


def chunk_suffix(counts: dict[str, Any] | None, *, include_usage: bool) -> bytes:
    """Return the end of a chunk after its choices.

    `usage` is null in chunks before the counts, and absent if the client did not ask for it.
    """
    return b'],"usage":' + orjson.dumps(counts) + b"}\n\n" if include_usage else b"]}\n\n"
