"""The record of the sounds in a model's prompts: their form, and the tower that makes embeddings of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from tercet.protocol.messages.audio import SoundFormat
from tercet.scheduler.models.audio.audio_model import Samples
from tercet.scheduler.models.tower import TowerModel

_FULL_SCALE = 32_768


class SoundTower(nn.Module):
    """transformers' own modules: features of samples, an encoder of features, and a projector to the text model."""

    def __init__(
        self, encoder: nn.Module, projector: nn.Module, features: Callable[..., Any], form: SoundFormat
    ) -> None:
        super().__init__()
        self.audio_tower = encoder
        self.multi_modal_projector = projector
        self._features = features
        self._form = form

    def forward(self, samples: Samples) -> torch.Tensor:
        """Return embeddings [embeddings, hidden] of samples at the model's rate, which padding follows unseen."""
        parameter = next(self.audio_tower.parameters())
        floats = samples.astype(np.float32) / np.float32(_FULL_SCALE)
        features = self._features(floats, sampling_rate=self._form.rate, return_tensors="pt").input_features
        whole = self._form.positions(self._form.samples)
        seen = torch.arange(whole, device=parameter.device) < self._form.positions(len(samples))
        hidden = self.audio_tower(
            features.to(parameter.device, parameter.dtype), attention_mask=seen.view(1, 1, 1, whole)
        ).last_hidden_state[0, : self._form.embeddings(len(samples))]
        embeddings: torch.Tensor = self.multi_modal_projector(hidden)
        return embeddings


@dataclass(frozen=True, kw_only=True)
class SoundModel(TowerModel[SoundTower]):
    """Sounds in the prompts of a model."""

    noun: ClassVar[str] = "encoder of sounds"
    form: SoundFormat
    whole: ClassVar[bool] = False
    """The tokens of a sound do not see each other."""
