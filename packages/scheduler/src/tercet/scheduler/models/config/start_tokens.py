"""The tokens that a decoder starts from, and settings of generation that are not applied."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.scheduler.model_files import ModelError, read_json

logger = logging.getLogger(__name__)

_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "suppress_tokens": ([],),
}
"""Fields of generation_config.json that transformers' `generate` applies, with the values that change nothing."""


def start_tokens(directory: Path) -> tuple[int, ...]:
    """Return the token that starts the decoder of the model in a directory, and the one that must follow it, if any.

    Log the settings of generation that are not applied here. Raise ModelError for a model that names no start.
    """
    config, file = read_json(directory / "config.json"), directory / "generation_config.json"
    generation = {**config, **(read_json(file) if file.is_file() else {})}
    ignored = [
        f"{name}={generation[name]!r}"
        for name, harmless in _NOT_APPLIED.items()
        if generation.get(name) is not None and generation[name] not in harmless
    ]
    if ignored:
        logger.warning("generation settings of the model are not applied: %s", " ".join(ignored))
    start = _token(generation, "decoder_start_token_id")
    if start is None:
        start = _token({**(config.get("decoder") or {}), **generation}, "bos_token_id")
    if start is None:
        raise ModelError("generation_config.json: decoder_start_token_id: must name the token that starts answers")
    forced = _token(generation, "forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def _token(generation: Mapping[str, Any], name: str) -> int | None:
    value = generation.get(name)
    if isinstance(value, list) and value:
        value = value[0]
    if value is not None and (type(value) is not int or value < 0):
        raise ModelError(f"generation_config.json: {name}: {value!r} is no token id")
    return value
