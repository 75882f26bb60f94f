"""Arrays of images equal those of transformers' image processors."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL")

from PIL import Image, ImageOps
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import get_anyres_image_grid_shape, unpad_image
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from packages.frontend.tests.media.image_files import noise, odd_images, saved
from tercet.frontend.media.image_pipe import Decode, Decoded
from tercet.frontend.media.image_sizes import AspectRatioError, array_size, canvas_grid, canvas_size
from tercet.frontend.media.image_worker import decoded_image
from tercet.protocol.messages.any_resolution import AnyResolution, PaddedSquare
from tercet.protocol.messages.media import (
    AspectTiles,
    CanvasTiles,
    CenterCrop,
    EdgeTiles,
    FilledPixels,
    FixedSize,
    ImageFormat,
    ImageSize,
    LongestEdge,
    PixelRange,
    TileTexts,
)
from tests.integration.llama4_processor import Llama4Processor, sizes_of

IMAGES = odd_images() | {
    f"{width}x{height}": saved(noise(width, height)) for width, height in ((100, 100), (90, 200), (333, 77), (28, 57))
}
NARROW = "3x2000"
AS_THEY_ARE: dict[str, Any] = {"do_rescale": False, "do_normalize": False}
"""Options of processors that leave pixels as they are in arrays."""


def decoded(name: str, size: ImageSize, patch: int, resample: int) -> Decoded:
    file = base64.b64encode(IMAGES[name]).decode()
    return decoded_image(Decode(base64=file, size=size, patch=patch, resample=resample, seconds=1))


def array_of(image: Decoded) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the array [3, height, width]."""
    return np.frombuffer(image.array, np.uint8).reshape(image.height, image.width, 3).transpose(2, 0, 1)


def expected_of(name: str, processor: Any, **options: Any) -> Any:
    """Return the inputs that an image processor makes of a file."""
    return processor(images=ImageOps.exif_transpose(Image.open(BytesIO(IMAGES[name]))), return_tensors="np", **options)


def stacked(tiles: Any) -> Any:
    """Return tiles [tiles, 3, side, side] one below another."""
    return np.concatenate([*tiles], axis=1)


@pytest.mark.parametrize("name", IMAGES)
def test_the_array_of_gemma_equals_that_of_transformers(name: str) -> None:
    processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 42}, **AS_THEY_ARE)
    [expected] = expected_of(name, processor)["pixel_values"]
    np.testing.assert_array_equal(array_of(decoded(name, FixedSize(height=56, width=42), 14, 2)), expected)


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {NARROW}))
def test_the_array_of_pixtral_equals_that_of_transformers(name: str) -> None:
    processor = PixtralImageProcessorPil(size={"longest_edge": 80}, patch_size={"height": 14, "width": 14})
    [expected] = expected_of(name, processor, **AS_THEY_ARE)["pixel_values"]
    np.testing.assert_array_equal(array_of(decoded(name, LongestEdge(max_edge=80), 14, 3)), expected)


@pytest.mark.parametrize("tokens", [70, 280])
@pytest.mark.parametrize("name", IMAGES)
def test_the_array_of_gemma_4_equals_that_of_transformers(name: str, tokens: int) -> None:
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=tokens, do_rescale=False)
    found = decoded(name, FilledPixels(max_pixels=tokens * 12**2), 12, 3)
    array = array_of(found)
    rows, columns = found.height // 4, found.width // 4
    patches = array.reshape(3, rows, 4, columns, 4).transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
    expected = expected_of(name, processor)
    np.testing.assert_array_equal(patches, expected["pixel_values"][0][: rows * columns])
    assert expected["num_soft_tokens_per_image"][0] * 9 == rows * columns


@given(height=st.integers(1, 3000), width=st.integers(1, 3000), tokens=st.sampled_from([70, 140, 1120]))
def test_sizes_of_gemma_4_equal_those_of_transformers(height: int, width: int, tokens: int) -> None:
    expected = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
    size = FilledPixels(max_pixels=tokens * 48**2)
    assert array_size(height, width, size, 48) == expected
    form = ImageFormat(size=size, patch=48, resample=3, marker="", token="", token_id=0, max_tokens=tokens)
    assert form.fits(*expected)
    assert form.embeddings(*expected) <= tokens


@pytest.mark.parametrize("edge", [56, 30])
@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {NARROW}))
def test_the_array_of_clip_equals_that_of_transformers(name: str, edge: int) -> None:
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": edge}, crop_size={"height": 42, "width": 56}, **AS_THEY_ARE
    )
    [expected] = expected_of(name, processor)["pixel_values"]
    found = decoded(name, CenterCrop(shortest_edge=edge, height=42, width=56), 14, 3)
    np.testing.assert_array_equal(array_of(found), expected)


@pytest.mark.parametrize(
    "size",
    [
        LongestEdge(max_edge=80),
        CenterCrop(shortest_edge=56, height=56, width=56),
        PaddedSquare(side=28, background=(0,) * 3),
    ],
)
def test_narrow_images_whose_ratio_counts_are_refused(size: ImageSize) -> None:
    with pytest.raises(AspectRatioError, match="no side may be 200 times as long"):
        decoded(NARROW, size, 14, 3)


@pytest.mark.parametrize(("least", "most"), [(1, 12), (3, 6), (1, 1)])
@pytest.mark.parametrize("name", IMAGES)
def test_the_tiles_of_internvl_equal_those_of_transformers(name: str, least: int, most: int) -> None:
    processor = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, min_patches=least, max_patches=most)
    expected = expected_of(name, processor, crop_to_patches=True, **AS_THEY_ARE)["pixel_values"]
    found = decoded(name, AspectTiles(tile=28, min_tiles=least, max_tiles=most), 14, 3)
    np.testing.assert_array_equal(array_of(found), stacked(expected))


@pytest.mark.parametrize(("tile", "edge"), [(28, 112), (30, 75), (64, 64)])
@pytest.mark.parametrize("name", IMAGES)
def test_the_tiles_of_smolvlm_equal_those_of_transformers(name: str, tile: int, edge: int) -> None:
    sizes = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": tile}}
    expected = expected_of(name, SmolVLMImageProcessorPil(**sizes), return_row_col_info=True, **AS_THEY_ARE)
    found = decoded(name, EdgeTiles(tile=tile, longest_edge=edge), tile // 2, 1)
    np.testing.assert_array_equal(array_of(found), stacked(expected["pixel_values"][0]))
    form = ImageFormat(
        size=EdgeTiles(tile=tile, longest_edge=edge),
        patch=tile // 2,
        resample=1,
        marker="<image>",
        prefix="<fake><global>",
        token="<image>",
        suffix="<fake>",
        token_id=1,
        max_tokens=1,
        tiles=TileTexts(tile="<fake><row_{row}_col_{column}>", row_break="\n", thumbnail="\n\n<fake><global>"),
    )
    [[rows]], [[columns]] = expected["rows"], expected["cols"]
    text = get_image_prompt_string(rows, columns, 4, "<fake>", "<image>", "<global>")
    assert form.replacement(found.height, found.width, found.grid) == text


@pytest.mark.parametrize(("tile", "most"), [(28, 16), (30, 5)])
@pytest.mark.parametrize("name", IMAGES)
def test_the_tiles_of_llama_4_equal_those_of_transformers(name: str, tile: int, most: int) -> None:
    found = decoded(name, CanvasTiles(tile=tile, max_tiles=most), tile // 2, 2)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(IMAGES[name])))
    processor = Llama4Processor({"height": tile}, most)
    np.testing.assert_array_equal(array_of(found), stacked(processor.tiles(upright).numpy()))
    grid = processor.grid(upright)
    assert found.grid == (grid if grid != (1, 1) else (0, 0))


@given(
    height=st.integers(1, 4000), width=st.integers(1, 4000), tile=st.sampled_from([28, 336]), most=st.integers(1, 16)
)
def test_sizes_of_llama_4_equal_those_of_transformers(height: int, width: int, tile: int, most: int) -> None:
    canvas, near = sizes_of(height, width, tile, most)
    rows, columns = canvas_grid(height, width, CanvasTiles(tile=tile, max_tiles=most))
    assert (rows * tile, columns * tile) == canvas
    assert canvas_size(height, width, canvas, tile) == near


GRIDS = [[height * 28, width * 28] for height in (1, 2, 3) for width in (1, 2, 3, 4)]
ANY = AnyResolution(tile=28, sizes=tuple((height, width) for height, width in GRIDS), max_tiles=9)


@pytest.mark.parametrize("name", IMAGES)
def test_the_tiles_of_llava_onevision_equal_those_of_transformers(name: str) -> None:
    processor = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=GRIDS)
    expected = expected_of(name, processor, **AS_THEY_ARE)
    found = decoded(name, ANY, 14, 3)
    np.testing.assert_array_equal(array_of(found), stacked(expected["pixel_values"][0]))
    assert found.original == tuple(expected["image_sizes"][0])


@pytest.mark.parametrize("name", sorted(IMAGES.keys() - {NARROW}))
def test_squares_of_llava_onevision_equal_those_of_transformers(name: str) -> None:
    processor = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_mean=[0.1, 0.5, 0.9])
    image = ImageOps.exif_transpose(Image.open(BytesIO(IMAGES[name])))
    expected = processor([[image, image]], return_tensors="np", **AS_THEY_ARE)["pixel_values"]
    found = decoded(name, PaddedSquare(side=28, background=(25, 127, 229)), 14, 3)
    np.testing.assert_array_equal(array_of(found), expected[1, 0])


@given(height=st.integers(1, 3000), width=st.integers(1, 3000))
def test_margins_of_llava_onevision_equal_those_of_transformers(height: int, width: int) -> None:
    rows, columns = get_anyres_image_grid_shape((height, width), GRIDS, 28)
    assert ANY.grid(height, width) == (rows, columns)
    whole = torch.arange(rows * columns * 25).view(1, rows * 5, columns * 5)
    inner = unpad_image(whole, (height, width))[0]
    found = ANY.inner(height, width, 5)
    assert found == tuple(inner.shape)
    assert ANY.embeddings(height, width, 5) <= ANY.most_embeddings(5)


@pytest.mark.parametrize("name", IMAGES)
def test_the_array_of_qwen_equals_that_of_transformers(name: str) -> None:
    least, most = 6 * 28 * 28, 12 * 28 * 28
    size = PixelRange(min_pixels=least, max_pixels=most)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(IMAGES[name])))
    sizes = {"shortest_edge": least, "longest_edge": most}
    processor = Qwen2VLImageProcessorPil(size=sizes, do_rescale=False, do_normalize=False)
    try:
        image = np.asarray(processor.convert_to_rgb(upright)).transpose(2, 0, 1)
        expected = processor.resize(image, SizeDict(**sizes), Image.Resampling.BICUBIC, factor=28)
    except ValueError:
        with pytest.raises(AspectRatioError):
            array_of(decoded(name, size, 28, 3))
        return
    np.testing.assert_array_equal(array_of(decoded(name, size, 28, 3)), expected)


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
