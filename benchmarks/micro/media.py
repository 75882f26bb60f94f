"""Images: decoding beside transformers' image processor, memory over 1,000 images, and text beside images.

Text beside images is measured with whole schedulers, and with an encoder of its own.

Decoding is measured in this process by the function that a helper runs, and through a helper. The server has a tiny
random Gemma 3 that takes images of 896 x 896 pixels, as the real one does, in larger patches.
"""

import asyncio
import base64
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from benchmarks.micro.cpu import Measured
from packages.frontend.tests.media.image_files import data_url, noise, saved
from packages.scheduler.tests.models.vision.checkpoint import write_gemma3
from tercet.frontend.media.image_decoder import ImageDecoder, ImageSource
from tercet.frontend.media.image_pipe import Decode
from tercet.frontend.media.image_worker import decoded_image
from tercet.protocol.messages.media import FixedSize, ImageFormat
from tests.chaos.parts import Parts, watched
from tests.server_process import Server

SIZE, PATCH, TOKENS = 896, 56, 16
FORM = ImageFormat(
    size=FixedSize(height=SIZE, width=SIZE),
    patch=SIZE // 4,
    resample=2,
    marker="",
    token="",
    token_id=0,
    max_tokens=TOKENS,
)
PROCESSOR = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
ROUNDS = 21
IMAGES, WARM = 1000, 200
"""Images of 1 MP that a server answers, and those before the first look at its memory."""
SECONDS, TEXT_CLIENTS, IMAGE_CLIENTS, ANSWER = 20.0, 4, 2, 64
MIB = 1 << 20


def photo(width: int, height: int, seed: int) -> Image.Image:
    """Return an image with the grain of a photo, which compresses about as badly."""
    grain = Image.frombytes("L", (512, 512), random.Random(seed).randbytes(1 << 18)).resize((width, height))
    return Image.blend(noise(width, height, seed=seed), grain.convert("RGB"), 0.2)


def decoding() -> Iterator[Measured]:
    """Yield the time of each kind of file here, in transformers and through a helper, called in turn."""
    files = {
        "JPEG of 1 MP": saved(photo(1000, 1000, 1), "JPEG", quality=90),
        "PNG of 1 MP": saved(photo(1000, 1000, 1)),
        "WebP of 1 MP": saved(photo(1000, 1000, 1), "WEBP"),
        "JPEG of 12 MP": saved(photo(4000, 3000, 1), "JPEG", quality=90),
    }
    decoder = ImageDecoder(workers=1)
    with asyncio.Runner() as runner:
        for name, file in files.items():
            source = ImageSource(url=data_url(file), param="")
            seconds = medians(
                {
                    "in the helper": partial(decoded_image, order_of(file)),
                    "transformers": partial(theirs, base64.b64encode(file)),
                    "through the helper": partial(decoded, runner, decoder, source),
                }
            )
            for kind, each in seconds.items():
                yield f"{name}, {len(file) / 1e6:.1f} MB: {kind}", each * 1e3, "ms", None
            yield f"{name}: transformers / in the helper", seconds["transformers"] / seconds["in the helper"], "x", 1.0
        runner.run(decoder.close())


def order_of(file: bytes) -> Decode:
    return Decode(base64=base64.b64encode(file).decode(), size=FORM.size, patch=FORM.patch, resample=2, seconds=5)


def theirs(text: bytes) -> object:
    """Return the pixels that transformers makes of a file in base64."""
    return PROCESSOR(images=Image.open(BytesIO(base64.b64decode(text))), return_tensors="np")


def decoded(runner: asyncio.Runner, decoder: ImageDecoder, source: ImageSource) -> None:
    async def decode() -> None:  # without a result, of which Runner.run would make a repr
        await decoder.decode(source, FORM)

    runner.run(decode())


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each call, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in times.items()}


class Clients:
    """Requests to one server."""

    def __init__(self, server: Server) -> None:
        self._http = httpx2.AsyncClient(base_url=server.url, timeout=120)
        self._model = server.model()
        self.tokens = self.images = 0
        self.image_seconds: list[float] = []
        """Time of each answer about an image."""

    async def text(self, number: int) -> None:
        """Ask for a text."""
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        await self._post("/generate", {"text": f"{number}. Once upon a time", "sampling_params": sampling})
        self.tokens += ANSWER

    async def image(self, number: int) -> None:
        """Show an image that no other request has."""
        file = await asyncio.to_thread(lambda: saved(photo(1000, 1000, number), "JPEG", quality=90))
        content = [{"type": "image_url", "image_url": {"url": data_url(file, "image/jpeg")}}]
        messages = [{"role": "user", "content": content}]
        began = time.perf_counter()
        await self._post("/v1/chat/completions", {"model": self._model, "messages": messages, "max_tokens": 4})
        self.image_seconds.append(time.perf_counter() - began)
        self.images += 1

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text


async def memory(parts: Parts) -> list[Measured]:
    """Return the memory of each part after some images, and its growth over `IMAGES` further ones."""
    clients, looks = Clients(parts.server), []
    waiting = iter(range(WARM + IMAGES))

    async def work(end: int) -> None:
        while clients.images < end and (number := next(waiting, None)) is not None:
            await clients.image(number)

    began = time.perf_counter()
    for end in (WARM, WARM + IMAGES):
        await asyncio.gather(*(work(end) for _ in range(IMAGE_CLIENTS)))
        await parts.idle()
        looks.append(parts.memory())
    rate = clients.images / (time.perf_counter() - began)
    await clients.close()
    before, after = looks
    rows: list[Measured] = [("images of 1 MP, all different, with their clients on this machine", rate, "1/s", None)]
    for name in parts.names:
        rows.append((f"{name}: memory after {WARM} images", before[name] / MIB, "MiB", None))
        rows.append((f"{name}: more after {IMAGES} others", (after[name] - before[name]) / MIB, "MiB", 12.0))
    return rows


async def throughput(server: Server, kind: str) -> list[Measured]:
    """Return tokens a second of texts alone, and beside images. `kind` names the server in the rows."""
    rates, seconds = [], 0.0
    for beside in (0, IMAGE_CLIENTS):
        clients, end = Clients(server), time.perf_counter() + SECONDS

        async def repeat(ask: Callable[[int], Any], first: int, end: float = end) -> None:
            number = first
            while time.perf_counter() < end:
                await ask(number)
                number += 1

        texts = [repeat(clients.text, 10_000 * each) for each in range(TEXT_CLIENTS)]
        await asyncio.gather(*texts, *(repeat(clients.image, 10_000 * (each + 1)) for each in range(beside)))
        await clients.close()
        rates.append((clients.tokens / SECONDS, clients.images / SECONDS))
        seconds = median(clients.image_seconds or [0.0])
    (alone, _), (tokens, images) = rates
    return [
        (f"{kind}: texts of {TEXT_CLIENTS} clients alone", alone, "tokens/s", None),
        (f"{kind}: the same beside {IMAGE_CLIENTS} clients with images of 1 MP", tokens, "tokens/s", None),
        (f"{kind}: images meanwhile", images, "1/s", None),
        (f"{kind}: median time of an answer of 4 tokens about an image", 1000 * seconds, "ms", None),
    ]


def rows() -> Iterator[Measured]:
    """Yield all figures."""
    yield from decoding()
    with tempfile.TemporaryDirectory() as name:
        directory = write_gemma3(Path(name) / "gemma3", size=SIZE, patch=PATCH, tokens=TOKENS)
        server = Server(str(directory), "--kv-cache-bytes", "64MiB").wait()
        try:
            with watched(server) as parts:
                yield from asyncio.run(throughput(server, "whole schedulers"))
                yield from asyncio.run(memory(parts))
        finally:
            server.stop()
        server = Server(str(directory), "--kv-cache-bytes", "64MiB", "--encoders", "1").wait()
        try:
            yield from asyncio.run(throughput(server, "an encoder of its own"))
        finally:
            server.stop()
