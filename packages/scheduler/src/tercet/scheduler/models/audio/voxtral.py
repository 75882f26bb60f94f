"""Sounds of Voxtral: Whisper's features of whole windows of 30 s, its encoder, and four positions for each token."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from msgspec.structs import replace

from tercet.protocol.messages.audio import SoundFormat
from tercet.scheduler.architectures import named_architecture
from tercet.scheduler.device.time_slices import pause
from tercet.scheduler.model_files import ModelError, read_json, tokenizer_files
from tercet.scheduler.models.audio.audio_model import FULL_SCALE, Samples
from tercet.scheduler.models.audio.sound_form import sound_form
from tercet.scheduler.models.audio.sound_model import SoundModel, SoundTower
from tercet.scheduler.models.audio.whisper import feature_sizes
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.tokenizer_files import added_token_texts

_ARCHITECTURE = "VoxtralForConditionalGeneration"
_TOKEN = 24
_WINDOWS = 80
"""40 min: the longest sound that Mistral names for its models."""
_SIZES = {"hidden_size": 1280, "intermediate_size": 5120}
"""transformers' defaults of the encoder's."""
_NAMES = {"audio_tower.": "audio_tower.", "multi_modal_projector.": "multi_modal_projector."}
_CONFIGS = ("audio_config", "text_config", "projector_hidden_act")
_BEGIN = "<s>"
_TRANSCRIPTION_TOKENS = {"[INST]", "[BEGIN_AUDIO]", "[/INST]", "[TRANSCRIBE]"}
_RANGE = 8.0
"""Powers of ten between the loudest feature of a sound and the quietest that counts."""


class VoxtralTower(SoundTower):
    """transformers' own encoder and projector, for one window of a sound at a time."""

    def forward(self, samples: Samples) -> torch.Tensor:
        """Return embeddings [embeddings, hidden] of samples at the model's rate."""
        parameter = next(self.audio_tower.parameters())
        parts: list[torch.Tensor] = []
        for window in self.features(samples):
            features = window.to(parameter.device, parameter.dtype)
            hidden = self.audio_tower(features[None]).last_hidden_state[0]
            parts.append(self.multi_modal_projector(hidden.reshape(len(hidden) // self._form.pooled, -1)))
        return torch.cat(parts)

    def features(self, samples: Samples) -> torch.Tensor:
        """Return log-mel features [windows, mels, features] of samples, padded with silence to whole windows.

        They are those that transformers computes of the sound as a whole: at the end of a window they see the next one,
        and the loudest of all is the measure of the quietest. Its extractor would hold up a batch while it computes
        minutes at once.
        """
        extractor: Any = self._features
        size, hop, window = extractor.n_fft, extractor.hop_length, self._form.window
        filters = torch.from_numpy(extractor.mel_filters).to(torch.float32).T  # [mels, bins]
        count = self._form.windows(len(samples))
        floats = torch.from_numpy(samples.astype(np.float32) / np.float32(FULL_SCALE))
        padded = F.pad(floats, (0, count * window - len(samples)))[None]
        padded = F.pad(padded, (size // 2, size // 2), mode="reflect")[0]
        logs = torch.empty(count, len(filters), window // hop)
        for number, log in enumerate(logs):
            part = padded[number * window :][: window - hop + size]
            spectrum = torch.stft(part, size, hop, window=torch.hann_window(size), center=False, return_complex=True)
            log.copy_((filters @ spectrum.abs() ** 2).clamp(min=1e-10).log10())
            pause()
        return (logs.clamp_(min=float(logs.max()) - _RANGE) + 4.0) / 4.0


def sound_model(directory: Path) -> SoundModel | None:
    """Return the sounds that the model in a directory takes; None if it is another model.

    Raise ModelError for features that are not supported.
    """
    config = read_json(directory / "config.json")
    if named_architecture(config) != _ARCHITECTURE:
        return None
    audio = config.get("audio_config") or {}
    hidden, grouped = (Fields(audio).count(name, usual) for name, usual in _SIZES.items())
    positions = Fields(audio).count("max_source_positions", 1500)
    pooled = grouped // hidden
    if pooled * hidden != grouped or positions % pooled:
        raise ModelError(f"audio_config: intermediate_size {grouped} does not hold whole positions of {hidden} values")
    token_id = Fields(config).count("audio_token_id", _TOKEN)
    form = sound_form(directory, audio, token_id, pooled=pooled, most_windows=_WINDOWS)
    known = set(added_token_texts(tokenizer_files(directory)).values())
    if known >= _TRANSCRIPTION_TOKENS:
        begin = _BEGIN if _BEGIN in known else ""
        form = replace(form, transcription=f"{begin}[INST][BEGIN_AUDIO]{form.marker}[/INST]{{language}}[TRANSCRIBE]")
    build = partial(_build, config, feature_sizes(directory), form)
    return SoundModel(form=form, build=build, names=_NAMES)


def _build(config: Mapping[str, Any], sizes: Mapping[str, int], form: SoundFormat) -> VoxtralTower:
    from transformers import AutoModel, VoxtralConfig, WhisperFeatureExtractor
    from transformers.models.voxtral.modeling_voxtral import VoxtralMultiModalProjector

    known = VoxtralConfig(**{name: config[name] for name in _CONFIGS if name in config})
    features = WhisperFeatureExtractor(feature_size=known.audio_config.num_mel_bins, **sizes)
    return VoxtralTower(AutoModel.from_config(known.audio_config), VoxtralMultiModalProjector(known), features, form)
