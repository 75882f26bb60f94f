"""Arrays of images equal those of transformers' image processors."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL")

from PIL import Image, ImageOps
from transformers.image_utils import ChannelDimension
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from packages.frontend.tests.media.files import odd_images
from tercet.frontend.media.pipe import Decode
from tercet.frontend.media.sizes import AspectRatioError, array_size
from tercet.frontend.media.worker import decoded_image
from tercet.protocol.messages.media import FixedSize, ImageSize, LongestEdge, PixelRange

IMAGES = odd_images()


def array_of(name: str, size: ImageSize, patch: int, resample: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the array [3, height, width] of a file."""
    file = base64.b64encode(IMAGES[name]).decode()
    image = decoded_image(Decode(base64=file, size=size, patch=patch, resample=resample, seconds=1))
    return np.frombuffer(image.array, np.uint8).reshape(image.height, image.width, 3).transpose(2, 0, 1)


@pytest.mark.parametrize("name", IMAGES)
def test_the_array_of_gemma_equals_that_of_transformers(name: str) -> None:
    processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 42}, do_rescale=False, do_normalize=False)
    image = ImageOps.exif_transpose(Image.open(BytesIO(IMAGES[name])))
    [expected] = processor(images=image, return_tensors="np")["pixel_values"]
    np.testing.assert_array_equal(array_of(name, FixedSize(height=56, width=42), 14, 2), expected)


sides = st.integers(1, 3000)


@given(sides, sides, st.sampled_from([14, 28, 32]), st.integers(1, 50), st.integers(50, 5000))
def test_sizes_of_qwen_equal_those_of_transformers(height: int, width: int, patch: int, least: int, most: int) -> None:
    size = PixelRange(min_pixels=least * patch * patch, max_pixels=most * patch * patch)
    try:
        expected = smart_resize(height, width, patch, size.min_pixels, size.max_pixels)
    except ValueError:
        with pytest.raises(AspectRatioError):
            array_size(height, width, size, patch)
        return
    assert array_size(height, width, size, patch) == expected


@given(sides, sides, st.sampled_from([14, 16, 28]), st.integers(28, 2000))
def test_sizes_of_pixtral_equal_those_of_transformers(height: int, width: int, patch: int, most: int) -> None:
    try:
        found = array_size(height, width, LongestEdge(max_edge=most), patch)
    except AspectRatioError:
        assert max(height, width) > 200 * min(height, width)
        return
    image = np.zeros((height, width, 3), np.uint8)
    expected = get_resize_output_image_size(image, most, patch, ChannelDimension.LAST)
    assert found == tuple(max(patch, side) for side in expected)
