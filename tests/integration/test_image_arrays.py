"""Arrays of images equal those of transformers' image processors."""

import base64
from io import BytesIO

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from packages.frontend.tests.media.files import odd_images
from tercet.frontend.media.pipe import Decode
from tercet.frontend.media.worker import image_array

IMAGES = odd_images()


@pytest.mark.parametrize("name", IMAGES)
def test_the_array_of_gemma_equals_that_of_transformers(name: str) -> None:
    processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 42}, do_rescale=False, do_normalize=False)
    image = ImageOps.exif_transpose(Image.open(BytesIO(IMAGES[name])))
    [expected] = processor(images=image, return_tensors="np")["pixel_values"]
    order = Decode(base64=base64.b64encode(IMAGES[name]).decode(), height=56, width=42, resample=2, seconds=1)
    array = np.frombuffer(image_array(order), np.uint8).reshape(56, 42, 3)
    np.testing.assert_array_equal(array.transpose(2, 0, 1), expected)
