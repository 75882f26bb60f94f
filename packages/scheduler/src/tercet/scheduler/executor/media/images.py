"""Images of a step: arrays that frontends sent, embeddings that the vision tower made of them, and their places."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.protocol.messages.any_resolution import AnyResolution, PaddedSquare
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.media import (
    AspectTiles,
    CanvasTiles,
    CenterCrop,
    EdgeTiles,
    FilledPixels,
    FixedSize,
    ImageFormat,
    ImageInput,
    LongestEdge,
    PixelRange,
)
from tercet.scheduler.core.images import Input, PlannedImage
from tercet.scheduler.core.plan import Row, SlotInit, excess_tokens
from tercet.scheduler.executor.media.embedding_cache import EmbeddingCache
from tercet.scheduler.executor.media.frame_store import FrameStore
from tercet.scheduler.executor.media.image_positions import ImagePositions
from tercet.scheduler.executor.media.shared_embeddings import Embeddings
from tercet.scheduler.executor.media.unread import Unread
from tercet.scheduler.executor.slot_tables import StepInputs
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower

MOST_ARRAY_BYTES = 4 << 30
"""Arrays of all held requests; further requests are refused."""
MOST_EMBEDDING_BYTES = 256 << 20
"""Embeddings of images that were used last, or those of the largest image if it has more."""


class LoadedImages(NamedTuple):
    """Images of a loaded model, and the tower that encodes them, which only rank 0 of several has."""

    model: ImageModel
    tower: VisionTower | None
    shared: Embeddings | None = None
    """With several ranks."""

    @property
    def excess_tokens(self) -> int:
        """Return the tokens by which a step may exceed its budget."""
        return excess_tokens(self.model.form, whole=self.model.whole)

    @torch.inference_mode()
    def encode_blank(self) -> None:
        """Encode the largest image or group of frames, for the memory that this takes."""
        if self.tower is None:
            return
        form, video = self.model.form, self.model.video
        if video is not None and video.max_tokens > form.max_tokens:
            side = math.isqrt(video.max_tokens) * video.patch
            self.tower(torch.zeros(video.frames, side, side, 3, dtype=torch.uint8))
        else:
            self.tower(torch.zeros(*_largest(form), 3, dtype=torch.uint8))


def _largest(form: ImageFormat) -> tuple[int, int]:
    match form.size:
        case FixedSize() | CenterCrop() as size:
            return size.height, size.width
        case AspectTiles() | CanvasTiles() as size:
            return (size.max_tiles + 1) * size.tile, size.tile
        case EdgeTiles() as size:
            return (math.ceil(size.longest_edge / size.tile) ** 2 + 1) * size.tile, size.tile
        case AnyResolution() as size:
            return (max(math.prod(size.grid(*each)) for each in size.sizes) + 1) * size.tile, size.tile
        case PaddedSquare() as size:
            return size.side, size.side
        case PixelRange() | FilledPixels() as size:
            side = math.isqrt(size.max_pixels)
        case LongestEdge() as size:
            side = size.max_edge
    side = max(1, side // form.patch) * form.patch
    return side, side


ArrayT = TypeVar("ArrayT")
"""Image, uint8 [height, width, 3], group of frames, uint8 [frames, height, width, 3], or samples of a sound."""


class ArrayStore(FrameStore, Generic[ArrayT]):
    """Arrays of the images or sounds of requests."""

    embeddings: EmbeddingForm | None = None
    """Form of embeddings that are held in the place of arrays."""

    def add(self, images: Sequence[Input], frames: Sequence[Frame]) -> str:
        """Keep the arrays of a request. Return a fault, or an empty text."""
        if [memoryview(frame).nbytes for frame in frames] != [each.array_bytes for each in images]:
            return f"the arrays do not fit the {self.kind}"
        return self.keep({each.sha256: frame for each, frame in zip(images, frames, strict=True)})

    def array(self, image: PlannedImage) -> ArrayT:
        """Return an array. Raise KeyError if it was never added or is dropped."""
        raise NotImplementedError


class ImageStore(ArrayStore[torch.Tensor]):
    """Arrays of the images of requests."""

    def __init__(self, most_bytes: int = MOST_ARRAY_BYTES) -> None:
        super().__init__("images", most_bytes)

    def array(self, image: PlannedImage) -> torch.Tensor:
        """Return the array of an image or a group of frames. Raise KeyError if it was never added or is dropped."""
        return image_array(self.frame(image.sha256), image)


def image_array(frame: Frame, image: PlannedImage | ImageInput) -> torch.Tensor:
    """Return an array that arrived as a frame, uint8 [height, width, 3], or [frames, height, width, 3] of a group."""
    frames = [image.frames] if image.frames else []
    return torch.from_numpy(np.frombuffer(frame, np.uint8).copy()).view(*frames, image.height, image.width, 3)


class _Shown(NamedTuple):
    """Image of a slot, and the places of its embeddings in the prompt."""

    image: PlannedImage
    places: "np.ndarray[tuple[int], np.dtype[np.int64]]"


class _Part(NamedTuple):
    """Embeddings of an image that a step needs, and their places among the tokens of the step."""

    image: PlannedImage
    embeddings: slice
    places: "np.ndarray[tuple[int], np.dtype[np.int64]]"


class StepImages(Generic[ArrayT]):
    """The images or sounds of each slot, and embeddings of images that were used last."""

    def __init__(
        self,
        tower: Callable[..., torch.Tensor] | None,
        store: ArrayStore[ArrayT],
        token_id: int,
        device: torch.device,
        *,
        whole: bool,
        in_windows: bool = False,
        group_id: int | None = None,
        positions: ImagePositions | None = None,
        most_bytes: int = MOST_EMBEDDING_BYTES,
        largest: int = 0,
        shared: Embeddings | None = None,
    ) -> None:
        """Create the images of steps; `positions` are those of a model in which they have several parts.

        `whole` and `in_windows` are those of `ImageModel`. The placeholder token is `token_id` of an image, and
        `group_id` of a group of frames.
        `tower` returns the embeddings [embeddings, hidden] of an array, and of the sizes in `PlannedImage.original`.
        Embeddings that were used last are kept: see `EmbeddingCache`. Without a tower, they are `shared` by rank 0.
        """
        self._tower = tower
        self._store = store
        self._token_id, self._group_id = token_id, group_id
        self._device = device
        self._whole, self._in_windows = whole, in_windows
        self._positions = positions
        self._shared = shared
        self._slots: dict[int, list[_Shown]] = {}
        self._embeddings = EmbeddingCache(most_bytes, largest)
        """By number and not by hash: embeddings of other namespaces must not save time."""

    def introduce(self, init: SlotInit) -> int:
        """Note the images of a choice that takes a slot. Return the shift of positions: see `SlotTables.introduce`."""
        self._slots.pop(init.slot, None)
        if init.images:
            ids = np.frombuffer(init.tokens, np.int32)
            self._slots[init.slot] = [_Shown(each, self._places(each, ids)) for each in init.images]
        return 0 if self._positions is None else self._positions.introduce(init)

    def unread(self, slot: int, computed: int) -> Unread | None:
        """Return the first image of a slot after its computed tokens whose embeddings are missing."""
        for image, _ in self._slots.get(slot, ()) if self._tower is not None else ():
            if image.first + image.tokens > computed and image.number not in self._embeddings:
                held = image.sha256 in self._store
                return Unread(image.first, image.number, held, partial(self._encode, image))
        return None

    def _encode(self, image: PlannedImage) -> None:
        self._embeddings.add(image.number, self._embedded(image))

    def _embedded(self, image: PlannedImage) -> torch.Tensor:
        assert self._tower is not None
        return self._tower(self._store.array(image), *image.original)

    def _places(
        self, image: PlannedImage, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    ) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        own = ids[image.first : image.first + image.tokens]
        return image.first + np.flatnonzero(own == (self._group_id if image.frames else self._token_id))

    def begin(self, rows: Sequence[Row], inputs: StepInputs) -> tuple[StepInputs, ReplacedEmbeddings | None]:
        """Return the inputs of a step as it needs them, and `embeddings`."""
        if self._positions is not None:
            inputs = self._positions.begin(rows, inputs)
        replaced = self.embeddings(rows)
        # no graph has images
        return inputs if replaced is None else replace(inputs, in_fixed_buffers=False), replaced

    def embeddings(self, rows: Sequence[Row]) -> ReplacedEmbeddings | None:
        """Return the embeddings of a step; None if no row is in an image."""
        if not self._slots:
            return None
        parts: list[_Part] = []
        offset = 0
        for row in rows:
            shown = self._slots.get(row.slot, ())
            for image, places in shown if shown and row.start <= shown[-1].places[-1] else ():
                first, last = np.searchsorted(places, (row.start, row.start + row.count))
                if first < last:
                    parts.append(_Part(image, slice(first, last), places[first:last] + (offset - row.start)))
            offset += row.count
        return self._replaced(rows, parts) if parts else None

    def _replaced(self, rows: Sequence[Row], parts: Sequence[_Part]) -> ReplacedEmbeddings:
        places = np.concatenate([part.places for part in parts])
        seen = None
        if self._whole:
            counts = np.concatenate([np.arange(row.start, row.start + row.count) + 1 for row in rows])
            for part in parts:
                counts[part.places] = part.image.first + part.image.tokens
            seen = torch.from_numpy(counts.astype(np.int32)).to(self._device)
        vectors = None if self._tower is None else self._vectors(parts)
        if self._shared is not None:
            vectors = self._shared.share(len(places), vectors)
        assert vectors is not None
        return ReplacedEmbeddings(torch.from_numpy(places).to(self._device), vectors, seen, self._in_windows)

    def _vectors(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Return the embeddings of parts. Images whose embeddings have made room for others are encoded again."""
        new: dict[int, torch.Tensor] = {}
        vectors: list[torch.Tensor] = []
        for image, part, _ in parts:
            if image.number not in new and (known := self._embeddings.get(image.number, part)) is not None:
                vectors.append(known)
                continue
            if image.number not in new:
                new[image.number] = self._embedded(image)
            vectors.append(new[image.number][part])
        for number, embeddings in new.items():
            self._embeddings.add(number, embeddings)
        return torch.cat(vectors)
