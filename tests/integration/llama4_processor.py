"""Llama 4's image processor, with transformers' sizes and tiles, and Pillow's filters in the place of torchvision's.

Both filters differ by at most one of 255. transformers' module imports torchvision, which no test has: its functions of
sizes need none of it.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.image_transforms import convert_to_rgb, split_to_tiles
from transformers.image_utils import SizeDict

_FILE = Path(transformers.__file__).parent / "models" / "llama4" / "image_processing_llama4.py"
_NAMES = ["torchvision" + part for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def _functions() -> Any:
    """Return transformers' module, imported without torchvision."""
    name = "transformers.models.llama4.image_processing_llama4"
    spec = importlib.util.spec_from_file_location(name, _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    absent = {each: ModuleType(each) for each in _NAMES if each not in sys.modules}
    sys.modules.update({**absent, name: module})
    setattr(sys.modules[_NAMES[-2]], "functional", sys.modules[_NAMES[-1]])  # noqa: B010 - for mypy
    try:
        spec.loader.exec_module(module)
    finally:
        for each in (*absent, name):
            del sys.modules[each]
    return module


FUNCTIONS = _functions()


def sizes_of(height: int, width: int, tile: int, most: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return transformers' sizes of the canvas and of the image on it."""
    possible = FUNCTIONS.find_supported_resolutions(most, SizeDict(height=tile, width=tile))
    canvas = FUNCTIONS.get_best_fit((height, width), torch.tensor(possible))
    bound = min(max(height, tile), canvas[0]), min(max(width, tile), canvas[1])
    rows, columns = (max(int(side), 1) for side in FUNCTIONS.get_max_res_without_distortion((height, width), bound))
    return (int(canvas[0]), int(canvas[1])), (rows, columns)


class Llama4Processor:
    """The processor of `preprocessor_config.json`."""

    def __init__(self, size: dict[str, int], max_patches: int) -> None:
        self._tile, self._most = size["height"], max_patches

    def grid(self, image: Image.Image) -> tuple[int, int]:
        """Return the rows and columns of tiles."""
        canvas, _ = sizes_of(image.height, image.width, self._tile, self._most)
        return canvas[0] // self._tile, canvas[1] // self._tile

    def tiles(self, image: Image.Image) -> torch.Tensor:
        """Return tiles uint8 [tiles, 3, side, side], with the thumbnail."""
        canvas, near = sizes_of(image.height, image.width, self._tile, self._most)
        whole = torch.zeros(1, 3, *canvas, dtype=torch.uint8)
        whole[0, :, : near[0], : near[1]] = _pixels(image, *near)
        rows, columns = self.grid(image)
        tiles: torch.Tensor = split_to_tiles(whole, rows, columns)[0]
        if rows * columns == 1:
            return tiles
        return torch.cat([tiles, _pixels(image, self._tile, self._tile)[None]])

    def __call__(self, images: list[Image.Image]) -> torch.Tensor:
        """Return the pixel values of images, in bfloat16 as they are computed."""
        tiles = torch.cat([self.tiles(image) for image in images]).bfloat16() * (1 / 255)
        half = torch.tensor(0.5, dtype=torch.bfloat16)
        return tiles.sub(half).div_(half)


def _pixels(image: Image.Image, height: int, width: int) -> torch.Tensor:
    small = np.asarray(convert_to_rgb(image).resize((width, height), Image.Resampling.BILINEAR))
    return torch.from_numpy(small.copy()).permute(2, 0, 1)
