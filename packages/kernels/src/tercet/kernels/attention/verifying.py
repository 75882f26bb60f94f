"""The grid on which a backend must equal plain torch before `auto` takes it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.check import Pair, make_batch, verdict

_HEAD_DIMS = (64, 128, 256)
_PAGE_SIZES = (1, 16, 64)
_HEADS = ((4, 4), (6, 2), (8, 2), (8, 1))
_OPTIONS = ((0, 0.0), (33, 0.0), (0, 30.0))
_ROWS = [(1, 1), (1, 17), (1, 300), (16, 16), (5, 70), (3, 65), (1, 40)]
"""Decodes, a prompt, prefixes that end within a page and with one, and a last token that follows extends."""


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    head_dim: int
    page_size: int
    heads: tuple[int, int]
    window: int
    softcap: float

    def run(self, backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> Pair:
        """What a backend gives, and the reference."""
        batch = make_batch(_ROWS, self.page_size, device)
        pages = int(batch.page_table.max()) + 1
        heads, kv_heads = self.heads
        k, v = torch.randn(2, pages, self.page_size, kv_heads, self.head_dim, device=device).to(dtype).unbind()
        q = torch.randn(sum(batch.host_query_lens), heads, self.head_dim, device=device).to(dtype)
        outputs = []
        for attention in (backend, ReferenceAttention()):
            attention.plan(batch)
            scale = self.head_dim**-0.5
            outputs.append(attention.attend(q, k, v, scale=scale, window=self.window, softcap=self.softcap).to(device))
        return outputs[0], outputs[1]


def grid() -> Iterator[Case]:
    """Every case."""
    for head_dim, page_size, heads, (window, softcap) in itertools.product(_HEAD_DIMS, _PAGE_SIZES, _HEADS, _OPTIONS):
        yield Case(head_dim, page_size, heads, window, softcap)


def grid_trouble(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The first case in which a backend is wrong, and how; empty where it is right in all.

    Raises UnavailableBackendError for a backend that does not run here.
    """
    backend = attention_backend(name, device)()
    for case in grid():
        if trouble := verdict(lambda case=case: case.run(backend, device, dtype)):  # type: ignore[misc]
            return f"{case}: {trouble}"
    return ""
