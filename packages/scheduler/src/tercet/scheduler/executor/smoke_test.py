"""A smoke test of a model that runs on transformers' modules, before it serves requests.

Two texts run over a paged cache: one in chunks, one beside it, then both token by token. Their logits must equal those
of a plain forward pass of the same model: transformers' own attention, masks and positions on the same weights.

The test uses the real weights, because a small copy of a model cannot be made of every config and would not reveal
errors in a checkpoint's own sizes. The texts are therefore only as long as a second or two allows. Windows may be
longer: they are read from the masks themselves (`models/attention_masks.py`), up to the served context length.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.model_config import DecoderShape

PlainForward = Callable[[torch.Tensor], torch.Tensor]
"""A function of one whole text: [tokens] -> logits [tokens, vocab]."""

_SHORT = 4
"""Prompt tokens of the second text."""
_DECODES = 2
_PAGE = 8
_EXACT, _ROUNDED = 1e-2, 0.1
"""Limits of the logits' relative error, in 32 and in 16 bits: above rounding, below any real difference."""
_FAILURES = (TypeError, AttributeError, KeyError, IndexError, NotImplementedError, RuntimeError, ValueError)
"""Errors of modules that cannot run in this way."""


class Row(NamedTuple):
    """Tokens of one text in one step, from `start` on."""

    text: int
    start: int
    tokens: int


@torch.inference_mode()
def run_smoke_test(model: Model, shape: DecoderShape, plain: PlainForward, text: torch.Tensor) -> None:
    """Raise ModelError unless a model gives the same logits over a paged cache as its `plain` forward does.

    `text` is [tokens], on the model's device. The second text is its end in reverse.
    """
    device, length, name = text.device, len(text), shape.architecture
    texts = [text, text.flip(0)[: _SHORT + _DECODES]]
    try:
        wanted = [plain(text) for text in texts]
    except _FAILURES as error:
        raise ModelError(f"{name} cannot be run: {_one_line(error)}") from error
    if wanted[0].shape != (length, shape.vocab_size):
        raise ModelError(f"{name} has logits {list(wanted[0].shape)} for {length} tokens of {shape.vocab_size} kinds")
    pool = _pool(shape, texts, device)
    for how, rows in _steps([len(text) for text in texts]):
        try:
            actual = model.compute_logits(_hidden(model, shape, pool, texts, rows))
        except ModelError:
            raise
        except _FAILURES as error:
            raise ModelError(f"{name} cannot run over a paged cache: {_one_line(error)}") from error
        expected = torch.cat([wanted[row.text][row.start : row.start + row.tokens] for row in rows])
        _compare(name, how, actual, expected, exact=shape.dtype == torch.float32)


def _steps(lengths: Sequence[int]) -> Iterator[tuple[str, list[Row]]]:
    """Yield steps that cover both texts, with a description of each."""
    long, short = lengths
    prompt, other = max(long - _DECODES, 1), max(short - _DECODES, 1)
    first = max(prompt // 3, 1)
    yield "in the first chunk of a text", [Row(0, 0, first)]
    rest = [Row(0, first, prompt - first)] if prompt > first else []
    yield "in a later chunk, beside another text", [*rest, Row(1, 0, other)]
    for step in range(_DECODES):
        rows = [Row(0, prompt + step, 1)] if prompt + step < long else []
        rows += [Row(1, other + step, 1)] if other + step < short else []
        if rows:
            yield "token by token after a prompt", rows


def _compare(name: str, how: str, actual: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """Raise ModelError for logits that are too far from those expected."""
    if actual.shape != expected.shape:
        raise ModelError(f"{name} has logits {list(actual.shape)} instead of {list(expected.shape)}")
    right = expected.float()
    right = right - right.mean(-1, keepdim=True)  # a constant added to all logits changes nothing
    ours = actual.float()
    ours = ours - ours.mean(-1, keepdim=True)
    apart = (ours - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
    worst, limit = (apart.max(), _EXACT) if exact else (apart.median(), _ROUNDED)
    if not worst < limit:
        raise ModelError(
            f"{name} cannot be served: {how} its logits are {float(worst):.0%} off those of transformers' own forward"
        )


def _pool(shape: DecoderShape, texts: Sequence[torch.Tensor], device: torch.device) -> KVPool:
    """Return a pool with pages for the texts, which alternate."""
    pages = KVShape(page_size=_PAGE, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype)
    most = len(texts) * -(-max(map(len, texts)) // _PAGE)
    return KVPool([KVGroup(name="trial", layers=dict.fromkeys(range(shape.layers), pages), pages=most)], device)


def _hidden(
    model: Model, shape: DecoderShape, pool: KVPool, texts: Sequence[torch.Tensor], rows: Sequence[Row]
) -> torch.Tensor:
    """Return the hidden states of a step's rows; earlier tokens of their texts are in the cache."""
    device = pool.device
    counts, lengths = [row.tokens for row in rows], [row.start + row.tokens for row in rows]
    each = [torch.arange(row.start, row.start + row.tokens, device=device) for row in rows]
    positions = torch.cat(each)
    table = torch.arange(pool.groups[0].pages, device=device).view(-1, len(texts)).T  # [texts, pages]
    chosen = table[[row.text for row in rows]].int()
    slots = [pages[places // _PAGE].long() * _PAGE + places % _PAGE for pages, places in zip(chosen, each, strict=True)]
    attention = AttentionBatch(
        query_start=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=chosen.contiguous(),
        slot_mapping=torch.cat(slots),
        page_size=_PAGE,
        host_query_lens=counts,
        host_kv_lens=lengths,
    )
    ids = torch.cat([texts[row.text][row.start : row.start + row.tokens] for row in rows])
    batch = ForwardBatch.planned(
        input_ids=ids,
        positions=positions,
        sample_index=positions[-1:],
        attention=[attention],
        backends=[TorchNativeAttention()],
        pool=pool,
    )
    watched: Any = _CheckedBatch(batch, shape)
    hidden = model(ids, positions, watched)
    if sorted(watched.layers) != list(range(shape.layers)):
        raise ModelError(f"{shape.architecture} attends in layers {watched.layers} of {shape.layers}")
    return hidden


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _CheckedBatch:
    """A batch that records the layers and checks the shapes of `attend` calls."""

    def __init__(self, batch: ForwardBatch, shape: DecoderShape) -> None:
        self._batch = batch
        self._name = shape.architecture
        self._expected = [shape.kv_heads, shape.head_dim]
        self.layers: list[int] = []

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        for name, heads in (("keys", k), ("values", v)):
            if list(heads.shape[1:]) != self._expected:
                shape = list(heads.shape[1:])
                raise ModelError(f"{self._name}: layer {layer_id} has {name} {shape}, not {self._expected}")
        self.layers.append(layer_id)
        return self._batch.attend(layer_id, q, k, v, params)
