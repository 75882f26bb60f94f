"""transformers' video processors without torchvision, which they import for resampling alone.

`sampled`, `sized` and `patches_of` run their own code. Frames are resampled by `torch.nn.functional.interpolate`, as
torchvision does.
"""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

Frames = np.ndarray[Any, np.dtype[np.uint8]]
"""Frames [frames, height, width, 3]."""
_PARTS = ("torchvision", "transforms", "v2", "functional")
_TORCHVISION = [".".join(_PARTS[: count + 1]) for count in range(len(_PARTS))]


def _imported(family: str) -> Any:
    """Return the module of a video processor, imported with empty modules in the place of torchvision."""
    added = [name for name in _TORCHVISION if name not in sys.modules]
    sys.modules |= {name: ModuleType(name) for name in added}
    try:
        return import_module(f"transformers.models.{family}.video_processing_{family}")
    finally:
        for name in added:
            del sys.modules[name]


QWEN2, QWEN3 = _imported("qwen2_vl"), _imported("qwen3_vl")


def sampled(module: Any, frames: int, per_second: float, **options: Any) -> list[int]:
    """Return the numbers of the frames that a processor with these options chooses."""
    usual = {"fps": 2, "num_frames": None, "temporal_patch_size": 2, "min_frames": 4, "max_frames": 768}
    processor = SimpleNamespace(**(usual | options))
    metadata = VideoMetadata(total_num_frames=frames, fps=per_second)
    return [int(index) for index in _kind(module).sample_frames(processor, metadata)]


def patches_of(
    module: Any, clip: Frames, mean: list[float], std: list[float], patch: int, merge: int
) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of a clip and its grid, after a processor's normalization."""
    frames = torch.from_numpy(clip.copy()).permute(0, 3, 1, 2).float() / 255
    pixels = (frames - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    patches, *grid = _kind(module).patchify(None, pixels[None], patch, merge, 2)
    return patches[0], grid


def sized(module: Any, height: int, width: int, frames: int, least: int, most: int, factor: int) -> tuple[int, int]:
    """Return the size of frames of a clip."""
    more = {"num_frames": frames} if module is QWEN3 else {}
    found = module.smart_resize(height=height, width=width, factor=factor, min_pixels=least, max_pixels=most, **more)
    return int(found[0]), int(found[1])


def resized(frames: Frames, size: tuple[int, int]) -> Frames:
    """Return frames of another size, with torchvision's antialiased bicubic filter."""
    pixels = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2)
    out = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    return out.permute(0, 2, 3, 1).numpy()


def _kind(module: Any) -> Any:
    """Return the class of a module's processor."""
    return module.Qwen3VLVideoProcessor if module is QWEN3 else module.Qwen2VLVideoProcessor
