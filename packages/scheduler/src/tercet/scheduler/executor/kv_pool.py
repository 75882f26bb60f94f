"""The KV pool: pages of keys and values for each layer of each cache group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.kernels import memory
from tercet.kernels.ops.store_kv import E4M3, store_kv
from tercet.scheduler.core.plan import PageCopy
from tercet.scheduler.device.staging import HostToDevice
from tercet.scheduler.models.weights.kv_scales import Scales


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """The shape of one page in one layer."""

    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int | None = None
    """Elements of a value; None: as many as of a key."""
    rank: int = 0
    """Elements of each key that also serve as its value (latent attention, MLA) and are not cached twice; 0 if
    values are cached.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values in one layer."""
        value_dim = 0 if self.rank else self.value_size
        return self.page_size * self.kv_heads * (self.head_dim + value_dim) * self.dtype.itemsize

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.rank or (self.head_dim if self.value_dim is None else self.value_dim)


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """A cache group: its layers with the shapes of their pages, and the number of pages of each."""

    name: str
    layers: Mapping[int, KVShape]
    pages: int
    window: int = 0


class KVPool:
    """Keys and values [pages, page_size, kv_heads, head_dim] of every layer. A page id means one page in each layer.

    Layers may differ in heads and their sizes, but not in the page size or dtype. If a shape has a `rank`, values are
    views of the keys. In float8_e4m3fn, keys and values are divided by a layer's `scales` (default 1); other dtypes
    have no scales.

    Memory is zeroed: padding is weighted with 0, and 0 times NaN is NaN. If `spare`, each group has one page more,
    with the id `pages`, to which padding is written.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        device: torch.device,
        *,
        spare: bool = False,
        scales: Mapping[int, Scales] | None = None,
        page_size: int = 0,
    ) -> None:
        """Allocate the pages. A pool without layers needs the `page_size`."""
        self.groups = groups
        self.shapes = {layer: shape for group in groups for layer, shape in group.layers.items()}
        if len({(shape.page_size, shape.dtype) for shape in self.shapes.values()}) > 1:
            raise ValueError("layers differ in page size or dtype")
        self.page_size = next((shape.page_size for shape in self.shapes.values()), page_size)
        """Tokens of a page."""
        self.device = device
        self.set_scales(scales)
        self._spare = spare
        self.group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for group in groups:
            for layer, shape in group.layers.items():
                size = (group.pages + spare, shape.page_size, shape.kv_heads)
                keys = self._keys[layer] = zeros((*size, shape.head_dim), shape.dtype, device)
                if not shape.rank:
                    self._values[layer] = zeros((*size, shape.value_size), shape.dtype, device)
                else:
                    self._values[layer] = keys[..., : shape.rank]

    @property
    def spare_pages(self) -> list[int]:
        """The spare page of each cache group; empty without spare pages."""
        return [group.pages for group in self.groups] if self._spare else []

    @property
    def bytes(self) -> int:
        """Size of the pool in bytes."""
        return sum(
            (group.pages + self._spare) * shape.page_bytes for group in self.groups for shape in group.layers.values()
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the pool. Values that are views of the keys are left out."""
        return [*self._keys.values(), *(self._values[layer] for layer, shape in self.shapes.items() if not shape.rank)]

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key and value caches of a layer."""
        return self._keys[layer_id], self._values[layer_id]

    def set_scales(self, scales: Mapping[int, Scales] | None) -> None:
        """Set the scales of keys and values that are stored from now on."""
        if scales and (wide := {shape.dtype for shape in self.shapes.values()} - {E4M3}):
            raise ValueError(f"keys and values in {wide.pop()} have no scales")
        self._scales = scales or {}

    def scales_of(self, layer_id: int) -> Scales:
        """Return the scales of a layer's keys and values."""
        return self._scales.get(layer_id, (1.0, 1.0))

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write the new tokens' k and v [tokens, kv_heads, head_dim]; k alone if v is a part of it."""
        if self.shapes[layer_id].rank:
            cache = self._keys[layer_id]
            cache.flatten(0, 1).index_copy_(0, slot_mapping, k.to(cache.dtype))
            return
        store_kv(k, v, self._keys[layer_id], self._values[layer_id], slot_mapping, self.scales_of(layer_id))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in list order: a target that is a later copy's source passes on its new content."""
        if not copies:
            return
        batch: list[PageCopy] = []
        written: set[tuple[int, int]] = set()
        for copy in copies:
            if not written.isdisjoint([(copy.group, copy.source), (copy.group, copy.target)]):
                self._copy(batch)
                batch, written = [], set()
            batch.append(copy)
            written.add((copy.group, copy.target))
        self._copy(batch)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        for index, group in enumerate(self.groups):
            mine = [copy for copy in copies if copy.group == index]
            if not mine or not group.layers:
                continue
            places = [copy.source for copy in mine], [copy.target for copy in mine]
            source, target = HostToDevice(self.device).send([np.array(each, dtype=np.int64) for each in places])
            for layer, shape in group.layers.items():
                for cache in self.layer(layer)[: 1 if shape.rank else 2]:
                    cache[target] = cache[source]


def zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeroed memory of a cache, which a CPU allocates when it is first written."""
    if device.type == "cpu":
        return memory.zeros(size, dtype)
    return torch.zeros(size, dtype=dtype, device=device)
