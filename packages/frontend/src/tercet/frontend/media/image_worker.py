"""`python -m tercet.frontend.media.image_worker`: a killable process that decodes clients' images with Pillow.

Errors complete "the image is refused: ". The process ends when its input ends.
"""

import binascii
import sys
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from tercet.frontend.helper.limits import detach, limit_memory, processor_time
from tercet.frontend.helper.pipe import encode_frame, read_frame
from tercet.frontend.media.image_pipe import Decode, Decoded, decode_order
from tercet.frontend.media.image_resizing import arranged
from tercet.frontend.media.image_sizes import AspectRatioError
from tercet.protocol.messages.any_resolution import AnyResolution

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Formats that OpenAI's and Anthropic's APIs take. Others would only be more code that reads untrusted files."""
MAX_PIXELS = 50_000_000
MEMORY = 1024 * 1024 * 1024
"""Bytes of address space beyond those the process has: five times the bytes of `MAX_PIXELS` pixels with alpha."""
_WHITE = (255, 255, 255, 255)


class RefusedError(Exception):
    """Image that is not decoded; the message is for the client."""


def main() -> None:
    """Process orders until the input ends."""
    detach()
    Image.init()
    Image.MAX_IMAGE_PIXELS = None  # `open_image` checks the size, and raises no warnings
    limit_memory(MEMORY)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while (data := read_frame(source)) is not None:
        order = decode_order(data)
        with processor_time(order.seconds):
            result = _decoded(order)
        target.write(encode_frame(result))
        target.flush()


def _decoded(order: Decode) -> Decoded:
    try:
        return decoded_image(order)
    except (RefusedError, AspectRatioError) as error:
        return Decoded(error=str(error))
    except MemoryError:
        return Decoded(error="it takes too much memory to decode")
    except Exception as error:  # Pillow raises many types for damaged files
        return Decoded(error=f"it is damaged ({type(error).__name__})")


def decoded_image(order: Decode) -> Decoded:
    """Return the first frame of a file, upright and resized. Raises an error for a file that is refused or damaged."""
    image = ImageOps.exif_transpose(open_image(order.file or file_of(order.base64)))
    array, grid = arranged(rgb_of(image), order.size, order.patch, order.resample)
    original = (image.height, image.width) if isinstance(order.size, AnyResolution) else ()
    return Decoded(array=array.tobytes(), height=array.height, width=array.width, grid=grid, original=original)


def file_of(text: str) -> bytes:
    """Return the file of a base64 text. Raises RefusedError."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise RefusedError("it is no base64") from None


def open_image(file: bytes) -> Image.Image:
    """Read the header of a file. Raises RefusedError for too large an image, before it is decoded."""
    try:
        image = Image.open(BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError:
        raise RefusedError(f"it is none of {', '.join(FORMATS)}") from None
    if (pixels := image.width * image.height) > MAX_PIXELS:
        raise RefusedError(f"it has {pixels} pixels, and at most {MAX_PIXELS} are decoded")
    return image


def rgb_of(image: Image.Image) -> Image.Image:
    """Return an image in RGB, on white where it is transparent, as transformers' image processors have it."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")


if __name__ == "__main__":
    main()
