"""Grid of cases in which a backend must equal plain torch before `auto` selects it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionParams, NewTokens, RotatingBackend
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.errors import DeviceFailedError
from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.store_kv import store_kv
from tercet.kernels.tools.check import Pair, make_batch, verdict

_HEAD_DIMS = (64, 128, 256)
_PAGE_SIZES = (1, 16, 64)
_HEADS = ((4, 4), (6, 2), (8, 2), (8, 1))
_OPTIONS = ((0, 0.0), (33, 0.0), (0, 30.0))
_ROWS = [(1, 1), (1, 17), (1, 300), (16, 16), (5, 70), (3, 65), (1, 40)]
"""Decodes, a prompt, prefixes that end within a page and at its end, and a decode that follows extends."""


@dataclass(frozen=True)
class Case:
    """Point of the grid."""

    head_dim: int
    page_size: int
    heads: tuple[int, int]
    window: int
    softcap: float

    @property
    def params(self) -> AttentionParams:
        """Parameters of the layer."""
        return AttentionParams(scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap)

    def run(self, backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> Pair:
        """Return (the result of `attend`, the reference) for a step of all `_ROWS`."""
        batch = make_batch(_ROWS, self.page_size, device)
        pages = int(batch.page_table.max()) + 1
        heads, kv_heads = self.heads
        k, v = torch.randn(2, pages, self.page_size, kv_heads, self.head_dim, device=device).to(dtype).unbind()
        q = torch.randn(sum(batch.host_query_lens), heads, self.head_dim, device=device).to(dtype)
        outputs = []
        for attention in (backend, ReferenceAttention()):
            attention.plan(batch)
            outputs.append(attention.attend(q, k, v, self.params).to(device))
        return outputs[0], outputs[1]

    def run_new(self, backend: RotatingBackend, device: torch.device, dtype: torch.dtype, *, norms: bool) -> Pair:
        """Return (the result of `attend_new`, the reference): outputs and caches of the decodes in `_ROWS`."""
        (heads, kv_heads), dim = self.heads, self.head_dim
        batch = make_batch([row for row in _ROWS if row[0] == 1], self.page_size, device)
        shape = (int(batch.page_table.max()) + 1, self.page_size, kv_heads, dim)
        keys, values = caches = torch.randn(2, *shape, device=device).to(dtype)
        projection = torch.randn(batch.rows, heads + 2 * kv_heads, dim, device=device).to(dtype)
        q, k, v = torch.split(projection, [heads, kv_heads, kv_heads], 1)
        positions, table = batch.kv_lens.long() - 1, rope_cache(batch.max_kv, dim, 1e4).to(device)
        one = torch.linspace(0.5, 1.5, dim, device=device).to(dtype)
        weights = (one, one.flip(0)) if norms else None
        new = NewTokens(k=k, v=v, positions=positions, table=table, norms=weights, eps=1e-6, scales=(1.0, 1.0))
        stored = caches.clone()
        backend.plan(batch)
        actual = backend.attend_new(q, keys, values, new, self.params)
        if weights is not None:
            q, k = rmsnorm(q, weights[0], new.eps), rmsnorm(k, weights[1], new.eps)
        q, k = apply_rope(q, k, positions, table)
        store_kv(k, v, stored[0], stored[1], batch.slot_mapping)
        reference = ReferenceAttention()
        reference.plan(batch)
        expected = reference.attend(q, stored[0], stored[1], self.params)
        return torch.cat([actual.flatten(), caches.flatten()]), torch.cat(
            [expected.flatten().to(device), stored.flatten()]
        )


def grid() -> Iterator[Case]:
    """Yield every case."""
    for head_dim, page_size, heads, (window, softcap) in itertools.product(_HEAD_DIMS, _PAGE_SIZES, _HEADS, _OPTIONS):
        yield Case(head_dim, page_size, heads, window, softcap)


def case_trouble(name: str, case: Case, device: torch.device, dtype: torch.dtype) -> str:
    """Return how a backend is wrong in a case; empty if it is right.

    Raises UnavailableBackendError for a backend that does not run here, and the errors of `verdict`.
    """
    backend = attention_backend(name, device)()
    runs: dict[str, Callable[[], Pair]] = {"": partial(case.run, backend, device, dtype)}
    if isinstance(backend, RotatingBackend):
        runs["rotating, "] = partial(case.run_new, backend, device, dtype, norms=False)
        runs["with norms, "] = partial(case.run_new, backend, device, dtype, norms=True)
    for kind, run in runs.items():
        try:
            trouble = verdict(run)
        except DeviceFailedError as error:
            raise DeviceFailedError(f"{kind}{case}: {error}") from error
        if trouble:
            return f"{kind}{case}: {trouble}"
    return ""
