"""Each operation called as a server of an 8B model calls it, in every form that is a kernel of its own."""

from collections.abc import Callable
from functools import partial

import torch

from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.check import make_batch

HEADS, KV_HEADS = 32, 8

DECODE = [(1, 1024)] * 4
EXTEND = [(200, 1000), (40, 40)]


def _attention(
    rows: list[tuple[int, int]],
    head_dim: int = 128,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> None:
    cpu = torch.device("cpu")
    batch = make_batch(rows, page_size, cpu)
    pages = int(batch.page_table.max()) + 1
    cache = torch.empty(pages, page_size, KV_HEADS, head_dim, dtype=dtype)
    q = torch.empty(sum(batch.host_query_lens), HEADS, head_dim, dtype=dtype)
    backend = TritonAttention()
    backend.plan(batch)
    given = torch.zeros(HEADS, dtype=dtype) if sinks else None
    backend.attend(q, cache, cache, scale=0.1, window=window, softcap=softcap, sinks=given)


CASES: dict[str, Callable[[], object]] = {
    "decode": partial(_attention, [(1, 1024)] * 2),
    "decode one split": partial(_attention, [(1, 100)] * 4),
    "decode head 64": partial(_attention, DECODE, head_dim=64, page_size=1),
    "decode head 256": partial(_attention, DECODE, head_dim=256, softcap=50.0),
    "decode window, sinks": partial(_attention, DECODE, head_dim=64, page_size=64, window=128, sinks=True),
    "decode float32": partial(_attention, DECODE, dtype=torch.float32),
    "extend": partial(_attention, EXTEND),
    "extend head 64": partial(_attention, EXTEND, head_dim=64, page_size=1),
    "extend head 256": partial(_attention, EXTEND, head_dim=256, softcap=50.0),
    "extend window, sinks": partial(_attention, EXTEND, head_dim=64, page_size=64, window=128, sinks=True),
    "extend float32": partial(_attention, EXTEND, dtype=torch.float32),
}
