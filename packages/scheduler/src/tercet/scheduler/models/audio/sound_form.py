"""The form of a model's sounds, from config.json, the feature extractor's file and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.protocol.messages.audio import SoundFormat
from tercet.scheduler.model_files import ModelError, tokenizer_files
from tercet.scheduler.models.audio.whisper import feature_sizes
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.tokenizer_files import added_token_texts

_FEATURES_OF_POSITION = 2


def sound_form(
    directory: Path, audio: Mapping[str, Any], token_id: int, *, pooled: int = 2, most_windows: int = 0
) -> SoundFormat:
    """Return the form of the sounds of a model with an `audio_config` and a placeholder token.

    With `most_windows` a sound is padded to whole windows, otherwise it has at most one. Raise ModelError for sizes
    that do not fit each other, and for a tokenizer without the token.
    """
    sizes = feature_sizes(directory)
    rate, hop, seconds = sizes["sampling_rate"], sizes["hop_length"], sizes["chunk_length"]
    positions = Fields(audio).count("max_source_positions", 1500)
    if seconds * rate != positions * _FEATURES_OF_POSITION * hop:
        raise ModelError(f"chunk_length {seconds} of the features is not {positions} positions of config.json")
    text = added_token_texts(tokenizer_files(directory)).get(token_id)
    if text is None:
        raise ModelError(f"tokenizer.json lacks the token of sounds, which is {token_id} in config.json")
    return SoundFormat(
        rate=rate,
        hop=hop,
        samples=seconds * rate * max(1, most_windows),
        marker=text,
        token=text,
        token_id=token_id,
        pooled=pooled,
        window=seconds * rate if most_windows else 0,
    )
