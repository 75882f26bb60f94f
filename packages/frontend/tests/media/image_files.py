"""Image files of all kinds, made with Pillow."""

import base64
import random
import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image, PngImagePlugin

from tercet.protocol.messages.media import FixedSize, ImageFormat

FORM = ImageFormat(
    size=FixedSize(height=28, width=14),
    patch=14,
    resample=2,
    marker="<image>",
    token="<image>",
    token_id=9,
    max_tokens=2,
)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of smooth noise, so that resizing filters differ."""
    small = Image.frombytes("RGBA", (8, 8), random.Random(seed).randbytes(256))
    return small.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated_by_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(noise(40, 20), "JPEG", exif=exif)


def animated(kind: str, frames: int = 3) -> bytes:
    images = [noise(20, 30, seed=number) for number in range(frames)]
    return saved(images[0], kind, save_all=True, append_images=images[1:])


def many_frames(kind: str, frames: int) -> bytes:
    """Return a GIF or WebP animation of two frames, the second of which is repeated."""
    file = animated(kind, frames=2)
    if kind == "GIF":
        second = file.rindex(b"\x21\xf9")
        return file[:second] + file[second:-1] * (frames - 1) + b";"
    second = file.rindex(b"ANMF")
    body = file[8:second] + file[second:] * (frames - 1)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_claiming(width: int, height: int) -> bytes:
    """Return a WebP animation of small frames on a huge canvas."""
    file = animated("WEBP", frames=2)
    canvas = file.index(b"VP8X") + 12
    size = b"".join((side - 1).to_bytes(3, "little") for side in (width, height))
    return file[:canvas] + size + file[canvas + 6 :]


def png_with_text(size: int) -> bytes:
    """Return a PNG whose compressed text grows to `size` bytes."""
    info = PngImagePlugin.PngInfo()
    info.add_text("note", "0" * size, zip=True)
    return saved(noise(9, 9), pnginfo=info)


def png_bomb(width: int, height: int) -> bytes:
    """Return a small PNG file of a huge image of one color."""
    row = b"\x00" + bytes(width // 8)
    compressor = zlib.compressobj(9)
    rows = b"".join(compressor.compress(row * 1000) for _ in range(height // 1000)) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def odd_images() -> dict[str, bytes]:
    """Return files of odd sizes, modes and formats by name."""
    palette = noise(50, 40).quantize(16)
    palette.info["transparency"] = 3
    return {
        "1x1": saved(noise(1, 1)),
        "3x2000": saved(noise(3, 2000)),
        "jpeg": saved(noise(61, 47), "JPEG"),
        "webp": saved(noise(61, 47), "WEBP"),
        "cmyk": saved(noise(40, 30, "CMYK"), "JPEG"),
        "palette": saved(palette, transparency=3),
        "alpha": saved(noise(40, 30, "RGBA")),
        "gray": saved(noise(40, 30, "L")),
        "gray with alpha": saved(noise(40, 30, "LA")),
        "one bit": saved(noise(40, 30, "1")),
        "16 bits": saved(Image.new("I;16", (9, 9), 40_000)),
        "animated gif": animated("GIF"),
        "animated webp": animated("WEBP"),
        "animated png": animated("PNG"),
        **{f"exif {number}": rotated_by_exif(number) for number in (3, 6, 7, 8)},
    }


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"
