"""Images of Qwen2-VL and its successors: one token for each square of patches, in an image's aspect ratio."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.protocol.messages.media import ImageFormat, PixelRange
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    FILE,
    Normalization,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
)
from tercet.scheduler.models.vision.qwen_video import most_tokens, video_format

_IMAGE_TOKEN = 151_655
_PIXELS = {"shortest_edge": ("min_pixels", 56 * 56), "longest_edge": ("max_pixels", 28 * 28 * 1280)}
"""Fields of the processor's `size`, and for each the older name and the default."""
_SIZES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
"""Fields of the processor that config.json has, too, and their defaults."""


class _PatchEmbedding(nn.Module):
    """A linear layer of flat patches, in the place of a convolution over each of them, which is slower on a CPU."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        size = conv.in_channels * math.prod(conv.kernel_size)
        self.proj = nn.Linear(size, conv.out_channels, bias=conv.bias is not None)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [patches, hidden] of patches [patches, channels * frames * pixels]."""
        hidden: torch.Tensor = self.proj(patches)
        return hidden


class QwenTower(VisionTower):
    """A tower of patches with rotary positions. Embeddings of further layers (deepstack) follow those of the last."""

    def __init__(self, normalization: Normalization, visual: nn.Module, patch: int, merge: int, frames: int) -> None:
        super().__init__(normalization)
        self.visual = visual
        self._patch, self._merge, self._frames = patch, merge, frames

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`."""
        patches, grid = self.patches(array)
        out = self.visual(patches, grid_thw=grid, return_dict=True)
        return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], 1)

    def patches(self, array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the patches of an array, [patches, channels * frames * pixels], and their grid int64 [1, 3].

        Patches that share an embedding follow each other. An image stands for a group of equal frames.
        """
        patch, merge = self._patch, self._merge
        if array.dim() == 3:
            frames = self.pixels(array).expand(self._frames, -1, -1, -1)
        else:
            frames = torch.stack([self.pixels(frame) for frame in array])
        rows, columns = frames.shape[2] // patch, frames.shape[3] // patch
        squares = frames.reshape(self._frames, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        patches = squares.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)
        return patches, torch.tensor([[1, rows, columns]], device=frames.device)


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size that is not supported.
    """
    if (processor := read_processor(directory)) is None:
        return None
    config = read_json(directory / "config.json")
    vision = _vision_config(config)
    sizes = {name: processor.get(name) or usual for name, usual in _SIZES.items()}
    for name, size in sizes.items():
        wanted = getattr(vision, name.replace("merge", "spatial_merge"))
        if size != wanted:
            raise ModelError(f"{FILE}: {name} {size} is not the one of config.json, {wanted}")
    return ImageModel(
        form=_form(directory, config, processor, sizes),
        whole=False,
        deepstack=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        video=video_format(directory, config, processor, sizes),
        build=partial(_build, vision, processor, sizes),
        names={"visual.": "visual."},
    )


def _vision_config(config: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    known: Any = AutoConfig.for_model(config["model_type"], vision_config=config["vision_config"])
    return known.vision_config


def _form(
    directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any], sizes: Mapping[str, int]
) -> ImageFormat:
    patch = sizes["patch_size"] * sizes["merge_size"]
    given = processor.get("size") or {}
    least, most = (
        processor.get(old) or given.get(name) or given.get(old) or usual for name, (old, usual) in _PIXELS.items()
    )
    token_id, token = image_token(directory, config, _IMAGE_TOKEN)
    return ImageFormat(
        size=PixelRange(min_pixels=least, max_pixels=most),
        patch=patch,
        resample=resample_of(processor, BICUBIC),
        marker=token,
        token=token,
        token_id=token_id,
        max_tokens=most_tokens(least / patch**2, most / patch**2),
    )


def _build(vision: Any, processor: Mapping[str, Any], sizes: Mapping[str, int]) -> VisionTower:
    from transformers import AutoModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    make = Qwen2VisionTransformerPretrainedModel._from_config  # AutoModel does not have it
    visual = make(vision) if vision.model_type == "qwen2_vl_vision" else AutoModel.from_config(vision)
    visual.patch_embed = _PatchEmbedding(visual.patch_embed.proj)
    return QwenTower(normalization_of(processor, CLIP_MEAN, CLIP_STD), visual, *sizes.values())
