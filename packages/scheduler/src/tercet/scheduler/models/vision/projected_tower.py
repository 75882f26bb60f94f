"""Vision towers with a projector to the embeddings of the text model, in the form of LLaVA."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.vision.image_model import VisionTower
from tercet.scheduler.models.vision.processor import Normalization

NAMES = {
    "vision_tower.vision_model.": "vision_tower.",  # of transformers 4
    "vision_tower.": "vision_tower.",
    "multi_modal_projector.": "multi_modal_projector.",
}
"""Names of tensors. See `ImageModel.names`."""


class ProjectedTower(VisionTower):
    """A tower and a projector of the states of `layers`, which are joined if there are several.

    None stands for the states after the tower's last norm.
    """

    def __init__(
        self,
        normalization: Normalization,
        vision_tower: nn.Module,
        projector: nn.Module,
        layers: int | Sequence[int] | None,
        skipped: int = 0,
    ) -> None:
        """Create a tower. The first `skipped` states of each layer, which are no patches, are left out."""
        super().__init__(normalization)
        self.vision_tower = vision_tower
        self.multi_modal_projector = projector
        self._layers = layers
        self._skipped = skipped

    def states(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the states [images, patches, size] of images [images, 3, height, width]."""
        if self._layers is None:
            last: torch.Tensor = self.vision_tower(pixel_values=pixels, return_dict=True).last_hidden_state
            return last[:, self._skipped :]
        output = self.vision_tower(pixel_values=pixels, output_hidden_states=self._layers, return_dict=True)
        layers = [self._layers] if isinstance(self._layers, int) else self._layers
        return torch.cat([output.hidden_states[layer][:, self._skipped :] for layer in layers], dim=-1)

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`."""
        embeddings: torch.Tensor = self.multi_modal_projector(self.states(self.pixels(array)[None]))
        return embeddings[0]


def layers_of(config: Mapping[str, Any], usual: int) -> int | list[int]:
    """Return `vision_feature_layer` of config.json. Raise ModelError for a layer that the tower lacks."""
    layers: int | list[int] = config.get("vision_feature_layer", usual)
    most = config["vision_config"].get("num_hidden_layers", 24)
    for layer in layers if isinstance(layers, list) and layers else [layers]:
        if type(layer) is not int or not -most - 1 <= layer <= most:
            raise ModelError(f"config.json: vision_feature_layer: {layers!r} is not a layer of the {most}, or several")
    return layers
