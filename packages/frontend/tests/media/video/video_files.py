"""Video files, made with PyAV: each frame has its number as its color."""

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import av
import numpy as np
from PIL import Image

from packages.frontend.tests.media.image_files import noise, saved


def frame(number: int, width: int = 96, height: int = 64) -> Image.Image:
    """Return noise with bars whose color is a frame's number."""
    pixels = np.asarray(noise(width, height, seed=number)).copy()
    pixels[: height // 4] = number % 256
    return Image.fromarray(pixels)


def video(
    frames: int = 30,
    *,
    rate: int = 10,
    size: tuple[int, int] = (96, 64),
    kind: str = "mp4",
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    blank: bool = False,
) -> bytes:
    """Return a video file. `blank` frames are all alike."""
    target = BytesIO()
    with av.open(target, "w", format=kind) as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.thread_count = 1
        for number in range(frames):
            shown = frame(0 if blank else number, *size)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(shown), format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()


def stills(images: Sequence[Image.Image], kind: str = "JPEG") -> str:
    """Return a URL with frames, as vLLM takes them."""
    files = (base64.b64encode(saved(image, kind)).decode() for image in images)
    return f"data:video/jpeg;base64,{','.join(files)}"


def data_url(file: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def number_of(image: "np.ndarray[Any, np.dtype[np.uint8]]") -> int:
    """Return the number of a frame from the color of its bar, which compression changes a little."""
    return round(float(image[: len(image) // 8].mean()))
