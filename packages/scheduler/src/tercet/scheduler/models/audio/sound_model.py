"""The record of the sounds in a model's prompts: their form, and the tower that makes embeddings of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tercet.protocol.messages.audio import SoundFormat
from tercet.scheduler.models.audio.audio_model import FULL_SCALE, Samples
from tercet.scheduler.models.tower import TowerModel


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
        """Return embeddings [embeddings, hidden] of samples at the model's rate."""
        parameter = next(self.audio_tower.parameters())
        floats = samples.astype(np.float32) / np.float32(FULL_SCALE)
        features = self._features(floats, sampling_rate=self._form.rate, return_tensors="pt").input_features
        features = features.to(parameter.device, parameter.dtype)
        embeddings: torch.Tensor = self.multi_modal_projector(
            self._encoded(features, self._form.positions(len(samples)))[0]
        )
        return embeddings

    def _encoded(self, features: torch.Tensor, positions: int) -> torch.Tensor:
        """Return hidden states [1, positions // 2, size] of features [1, mels, features].

        transformers computes the positions of the padding, too, which no other position sees.
        """
        tower: Any = self.audio_tower
        x = features[:, :, : 2 * positions + 1]  # those that the convolutions read for these positions
        x = F.gelu(tower.conv2(F.gelu(tower.conv1(x))))[:, :, :positions].transpose(1, 2)
        x = x + tower.embed_positions.weight[:positions]
        for layer in tower.layers:
            x = layer(x, None)
        hidden: torch.Tensor = tower.layer_norm(tower.avg_pooler(x.transpose(1, 2)).transpose(1, 2))
        return hidden


@dataclass(frozen=True, kw_only=True)
class SoundModel(TowerModel[SoundTower]):
    """Sounds in the prompts of a model."""

    noun: ClassVar[str] = "encoder of sounds"
    form: SoundFormat
    whole: ClassVar[bool] = False
    """The tokens of a sound do not see each other."""
