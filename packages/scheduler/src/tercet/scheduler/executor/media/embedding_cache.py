"""Cache of the embeddings of images."""

from collections import OrderedDict

import torch

_PAGE = 64
"""Embeddings of a page."""


class EmbeddingCache:
    """Embeddings that were used last, by number of the image, in pages of one tensor of at most `most_bytes`.

    It holds at least one image of `largest` embeddings, which is encoded once for all of its chunks.

    Tensors of their own would lie in the heap between blocks that the tower has freed, and no large block could take
    the place of these again: memory would grow by some MB with each image.
    """

    def __init__(self, most_bytes: int, largest: int = 0) -> None:
        self._most_bytes, self._largest = most_bytes, largest
        self._memory: torch.Tensor | None = None  # [pages * _PAGE, hidden]
        self._free: list[int] = []
        self._images: OrderedDict[int, tuple[list[int], int]] = OrderedDict()  # pages and embeddings of each

    def __contains__(self, number: int) -> bool:
        return number in self._images

    def get(self, number: int, part: slice) -> torch.Tensor | None:
        """Return a copy of a part of an image's embeddings; None if they are not there."""
        if self._memory is None or number not in self._images:
            return None
        self._images.move_to_end(number)
        return self._memory[self._rows(number)[part]]

    def add(self, number: int, embeddings: torch.Tensor) -> None:
        """Copy the embeddings of an image, in the place of those that were used first if there is no room."""
        if self._memory is None:
            pages = max(self._most_bytes // (embeddings[0].nbytes * _PAGE), -(-self._largest // _PAGE))
            self._memory = embeddings.new_empty(pages * _PAGE, embeddings.shape[1])
            self._free = list(range(pages))
        needed = -(-len(embeddings) // _PAGE)
        if needed * _PAGE > len(self._memory):
            return
        while len(self._free) < needed:
            _, (freed, _) = self._images.popitem(last=False)
            self._free += freed
        self._images[number] = [self._free.pop() for _ in range(needed)], len(embeddings)
        self._memory[self._rows(number)] = embeddings

    def _rows(self, number: int) -> torch.Tensor:
        """Return the rows of the memory that hold an image, int64."""
        assert self._memory is not None
        pages, count = self._images[number]
        rows = torch.tensor(pages)[:, None] * _PAGE + torch.arange(_PAGE)
        return rows.flatten()[:count].to(self._memory.device)
