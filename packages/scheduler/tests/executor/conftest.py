"""A model of one attention layer, and steps for it, for what wraps a model; and the operations of samplers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch

from packages.kernels.tests.quick_interpreter import quicken
from packages.scheduler.tests.executor.encoders.encoders import Make, maker
from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops import sampler_ops
from tercet.kernels.triton import missing_triton
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.sampling.sampler import SamplingOps

quicken()

PAGE, PAGES, WIDTH, VOCAB = 4, 24, 6, 50

TRITON = pytest.mark.skipif(bool(missing_triton(torch.device("cpu"))), reason="no interpreter of Triton's kernels")
NATIVE = pytest.mark.skipif(bool(missing_library()), reason=missing_library())

Rows = Sequence[tuple[int, int, int]]
"""(sequence, its new tokens, its tokens after the step)"""


class Attending:
    """Embeds tokens and positions, and attends once. Counts the tokens of its calls."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, 8, generator=generator)
        self.calls: list[int] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self.calls.append(len(input_ids))
        x = self.table[input_ids] + positions[:, None] / 10
        heads = x.view(len(x), 2, 4)
        return x + batch.attend(0, heads, heads[:, :1], -heads[:, :1], AttentionParams(scale=1.0)).flatten(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table.T


class Steps:
    """A pool, and sequences whose pages lie in it in no order."""

    def __init__(self, backend: Callable[[], AttentionBackend] = TorchNativeAttention, *, head_dim: int = 4) -> None:
        shape = KVShape(page_size=PAGE, kv_heads=1, head_dim=head_dim, dtype=torch.float32)
        self.pool = KVPool([KVGroup(name="full", layers={0: shape}, pages=PAGES)], torch.device("cpu"), spare=True)
        self.tables = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).view(-1, WIDTH).int()
        self.backend = backend()

    def step(self, rows: Rows) -> ForwardBatch:
        """Token p of sequence s is (7 * s + 3 * p) % VOCAB."""
        counts = [count for _, count, _ in rows]
        kv_lens = [length for *_, length in rows]
        places = [(seq, place) for seq, count, length in rows for place in range(length - count, length)]
        attention = AttentionBatch(
            query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=self.tables[[seq for seq, *_ in rows], : -(-max(kv_lens) // PAGE)],
            slot_mapping=torch.tensor(
                [int(self.tables[seq, place // PAGE]) * PAGE + place % PAGE for seq, place in places]
            ),
            page_size=PAGE,
            host_query_lens=counts,
            host_kv_lens=kv_lens,
        )
        return ForwardBatch.planned(
            input_ids=torch.tensor([(7 * seq + 3 * place) % VOCAB for seq, place in places]),
            positions=torch.tensor([place for _, place in places]),
            sample_index=torch.tensor([0]),
            attention=[attention],
            backends=[self.backend],
            pool=self.pool,
        )


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Random encoders."""
    return maker(tmp_path_factory.mktemp)


@pytest.fixture
def attending() -> Attending:
    return Attending()


@pytest.fixture
def steps() -> type[Steps]:
    return Steps


@pytest.fixture(params=["torch", pytest.param("native", marks=NATIVE), pytest.param("triton", marks=TRITON)])
def ops(request: pytest.FixtureRequest) -> Iterator[SamplingOps]:
    """On each backend that runs here."""
    with np.errstate(all="ignore"):  # the interpreter's numpy warns where a GPU would say inf
        if request.param == "triton":
            from tercet.kernels.triton.sampling import sampler_ops as fused_ops

            yield fused_ops
        else:
            yield NativeOps(load_library()) if request.param == "native" else sampler_ops
