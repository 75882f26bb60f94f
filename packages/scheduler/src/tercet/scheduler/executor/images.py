"""Images of a step: arrays that frontends sent, embeddings that the vision tower made of them, and their places."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.scheduler.core.plan import PlannedImage, Row, SlotInit, excess_tokens
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower

MOST_ARRAY_BYTES = 4 << 30
"""Arrays of all held requests; further requests are refused."""
MOST_EMBEDDING_BYTES = 256 << 20


class LoadedImages(NamedTuple):
    """Images of a loaded model, and the tower that encodes them."""

    model: ImageModel
    tower: VisionTower

    @property
    def excess_tokens(self) -> int:
        """Return the tokens by which a step may exceed its budget."""
        return excess_tokens(self.model.form, whole=self.model.whole)

    @torch.inference_mode()
    def encode_blank(self) -> None:
        """Encode an image, for the memory that this takes."""
        form = self.model.form
        self.tower(torch.zeros(1, form.height, form.width, 3, dtype=torch.uint8))


Tower = Callable[[torch.Tensor], torch.Tensor]
"""Embeddings [images, tokens, hidden] of arrays uint8 [images, height, width, 3]."""


class ImageStore:
    """Arrays by hash, as long as a held choice needs them. The loop adds and retains, the executor reads."""

    def __init__(self, form: ImageFormat, most_bytes: int = MOST_ARRAY_BYTES) -> None:
        self.form = form
        self._most = most_bytes // form.array_bytes
        self._arrays: dict[bytes, Frame] = {}

    def add(self, images: Sequence[ImageInput], frames: Sequence[Frame]) -> str:
        """Keep the arrays of a request, without copying them. Return a fault, or an empty text."""
        if [memoryview(frame).nbytes for frame in frames] != [self.form.array_bytes] * len(images):
            return "the arrays do not fit the images"
        arrays = {each.sha256: frame for each, frame in zip(images, frames, strict=True)}
        if len(self._arrays.keys() | arrays.keys()) > self._most:
            return "too many images are held"
        self._arrays.update(arrays)
        return ""

    def retain(self, needed: Collection[bytes]) -> None:
        """Drop all other arrays."""
        for sha256 in self._arrays.keys() - needed:
            del self._arrays[sha256]

    def array(self, sha256: bytes) -> torch.Tensor:
        """Return an array, uint8 [height, width, 3]. Raise KeyError if it was never added or is dropped."""
        flat = np.frombuffer(self._arrays[sha256], np.uint8)
        return torch.from_numpy(flat.copy()).view(self.form.height, self.form.width, 3)


class EmbeddingCache:
    """Embeddings that were used last, by number of the image, in one tensor of at most `most_bytes`.

    Tensors of their own would lie in the heap between blocks that the tower has freed, and no large block could take
    the place of these again: memory would grow by some MB with each image.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._memory: torch.Tensor | None = None  # [rows, tokens, hidden]
        self._rows: OrderedDict[int, int] = OrderedDict()

    def get(self, number: int) -> torch.Tensor | None:
        """Return an embedding, which is valid until the next `add`; None if it is not there."""
        if self._memory is None or number not in self._rows:
            return None
        self._rows.move_to_end(number)
        return self._memory[self._rows[number]]

    def add(self, number: int, embedding: torch.Tensor) -> None:
        """Copy an embedding, in the place of the one that was used first if there is no room."""
        if self._memory is None:
            self._memory = embedding.new_empty(self._most_bytes // embedding.nbytes, *embedding.shape)
        row = len(self._rows)
        if row == len(self._memory):
            if not row:
                return
            _, row = self._rows.popitem(last=False)
        self._memory[row] = embedding
        self._rows[number] = row


class StepImages:
    """The images of each slot, and at most `most_bytes` of embeddings, those that were used last."""

    def __init__(
        self,
        tower: Tower,
        store: ImageStore,
        device: torch.device,
        *,
        whole: bool,
        most_bytes: int = MOST_EMBEDDING_BYTES,
    ) -> None:
        self._tower = tower
        self._store = store
        self._device = device
        self._whole = whole
        self._slots: dict[int, list[PlannedImage]] = {}
        self._embeddings = EmbeddingCache(most_bytes)
        """By number and not by hash: embeddings of other namespaces must not save time."""

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Note the images of choices that take slots."""
        for init in inits:
            self._slots.pop(init.slot, None)
            if init.images:
                self._slots[init.slot] = init.images

    def begin(self, rows: Sequence[Row]) -> ReplacedEmbeddings | None:
        """Return the embeddings of a step, after encoding what is missing; None if no row is in an image."""
        if not self._slots:
            return None
        parts: list[tuple[PlannedImage, range, int]] = []  # of each image, its tokens in a row and their place
        offset = 0
        for row in rows:
            end = row.start + row.count
            for image in self._slots.get(row.slot, ()):
                first, last = max(row.start, image.first), min(end, image.first + image.tokens)
                if first < last:
                    parts.append((image, range(first, last), offset + first - row.start))
            offset += row.count
        return self._replaced(rows, parts) if parts else None

    def _replaced(self, rows: Sequence[Row], parts: Sequence[tuple[PlannedImage, range, int]]) -> ReplacedEmbeddings:
        places = np.concatenate([np.arange(place, place + len(tokens)) for _, tokens, place in parts])
        seen = None
        if self._whole:
            counts = np.concatenate([np.arange(row.start, row.start + row.count) + 1 for row in rows])
            for _, tokens, place in parts:
                counts[place : place + len(tokens)] = tokens.stop
            seen = torch.from_numpy(counts.astype(np.int32)).to(self._device)
        return ReplacedEmbeddings(torch.from_numpy(places).to(self._device), self._vectors(parts), seen)

    def _vectors(self, parts: Sequence[tuple[PlannedImage, range, int]]) -> torch.Tensor:
        """Return the embeddings of tokens of images. Images whose embeddings are missing are encoded one by one."""
        encoded: dict[int, torch.Tensor] = {}
        new: dict[int, torch.Tensor] = {}
        for image, _, _ in parts:
            if image.number not in encoded:
                known = self._embeddings.get(image.number)
                if known is None:
                    known = new[image.number] = self._tower(self._store.array(image.sha256)[None])[0]
                encoded[image.number] = known
        vectors = torch.cat(
            [
                encoded[image.number][tokens.start - image.first : tokens.stop - image.first]
                for image, tokens, _ in parts
            ]
        )
        for number, embedding in new.items():
            self._embeddings.add(number, embedding)
        return vectors


def step_images(loaded: LoadedImages | None, store: ImageStore | None, device: torch.device) -> StepImages | None:
    """Return the images of a model's steps; None if it takes none."""
    if loaded is None or store is None:
        return None
    return StepImages(loaded.tower, store, device, whole=loaded.model.whole)
