"""Sounds of Qwen2-Audio: Whisper's features and encoder, pooled in pairs of positions: 40 ms for each token."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tercet.protocol.messages.audio import SoundFormat
from tercet.scheduler.architectures import named_architecture
from tercet.scheduler.model_files import read_json
from tercet.scheduler.models.audio.sound_form import sound_form
from tercet.scheduler.models.audio.sound_model import SoundModel, SoundTower
from tercet.scheduler.models.audio.whisper import feature_sizes
from tercet.scheduler.models.config.config_fields import Fields

ARCHITECTURE = "Qwen2AudioForConditionalGeneration"
_TOKEN = 151_646
_NAMES = {"audio_tower.": "audio_tower.", "multi_modal_projector.": "multi_modal_projector."}
_CONFIGS = ("audio_config", "text_config")


def sound_model(directory: Path) -> SoundModel | None:
    """Return the sounds that the model in a directory takes; None if it reads text only.

    Raise ModelError for features that are not supported.
    """
    config = read_json(directory / "config.json")
    if named_architecture(config) != ARCHITECTURE:
        return None
    form = sound_form(directory, config.get("audio_config") or {}, Fields(config).count("audio_token_index", _TOKEN))
    return SoundModel(form=form, build=partial(_build, config, feature_sizes(directory), form), names=_NAMES)


def _build(config: Mapping[str, Any], sizes: Mapping[str, int], form: SoundFormat) -> SoundTower:
    from transformers import AutoModel, Qwen2AudioConfig, WhisperFeatureExtractor
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

    known = Qwen2AudioConfig(**{name: config[name] for name in _CONFIGS if name in config})
    features = WhisperFeatureExtractor(feature_size=known.audio_config.num_mel_bins, **sizes)
    return SoundTower(AutoModel.from_config(known.audio_config), Qwen2AudioMultiModalProjector(known), features, form)
