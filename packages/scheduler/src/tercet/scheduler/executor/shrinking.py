"""A model that computes a step in parts when the device has not the memory for it whole."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.scheduler.executor.forward_batch import ForwardBatch, ForwardMode
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.shortage import again, release_cached

logger = logging.getLogger(__name__)

_FORGOTTEN_AFTER = 256
"""Calls of the model that found memory: then one as large as what failed may find it, too."""


class ShrinkingModel:
    """A `Model` around another. Once a step was too large, steps of that size are halved for a while before they fail.

    A step may be computed twice, which changes nothing: the same keys and values are written again.
    """

    def __init__(self, model: Model, release: Callable[[], None] = release_cached) -> None:
        self._model = model
        self._release = release
        self._most: int | None = None
        self._found = 0  # calls that found memory since one did not

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`. Raises torch.OutOfMemoryError where there is no memory for one token."""
        tokens = len(input_ids)
        if self._most is None or tokens <= self._most:
            try:
                hidden = again(lambda: self._model(input_ids, positions, batch), self._release)
                self._found += 1
                if self._found >= _FORGOTTEN_AFTER:
                    self._most = None
                return hidden
            except torch.OutOfMemoryError:
                if tokens == 1:
                    raise
                self._most, self._found = tokens // 2, 0
                logger.warning("no memory for a step of %d tokens: for a while at most %d", tokens, self._most)
            self._release()
        parts = []
        for part in halves(batch):
            for backend, group in zip(part.backends, part.attention, strict=True):
                backend.plan(group)
            hidden = self(part.input_ids, part.positions, part)
            # What a graph gives is good until its next replay, and that may be the other half's.
            parts.append(again(hidden.clone, self._release))
        return again(lambda: torch.cat(parts), self._release)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`. Where there is no memory, all that torch keeps is given back first."""
        return again(lambda: self._model.compute_logits(hidden), self._release)


def halves(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """A step's tokens in two: a row that is cut goes on in the second half where it stopped in the first."""
    cut = len(batch.input_ids) // 2
    parts = [_split(group, cut) for group in batch.attention]
    sides = []
    for side, tokens in enumerate((slice(cut), slice(cut, None))):
        attention = [part[side] for part in parts]
        sides.append(
            replace(
                batch,
                mode=ForwardMode.of(attention[0].host_query_lens),
                input_ids=batch.input_ids[tokens],
                positions=batch.positions[tokens],
                attention=attention,
            )
        )
    return sides[0], sides[1]


def _split(group: AttentionBatch, cut: int) -> tuple[AttentionBatch, AttentionBatch]:
    """The rows of the first `cut` tokens, and those of the others."""
    whole, before = 0, 0  # rows that end before the cut, and their tokens
    while before + group.host_query_lens[whole] <= cut:
        before += group.host_query_lens[whole]
        whole += 1
    inside = cut - before  # tokens of the next row that belong to the first half
    rest = [group.host_query_lens[whole] - inside, *group.host_query_lens[whole + 1 :]]
    query_lens, kv_lens = group.host_query_lens[:whole], group.host_kv_lens[:whole]
    if inside:
        query_lens = [*query_lens, inside]
        kv_lens = [*kv_lens, group.host_kv_lens[whole] - rest[0]]
    first = _rows(group, slice(len(query_lens)), slice(cut), query_lens, kv_lens)
    return first, _rows(group, slice(whole, None), slice(cut, None), rest, group.host_kv_lens[whole:])


def _rows(
    group: AttentionBatch, rows: slice, tokens: slice, query_lens: list[int], kv_lens: list[int]
) -> AttentionBatch:
    device = group.kv_lens.device
    return replace(
        group,
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32).to(device),
        page_table=group.page_table[rows],
        slot_mapping=group.slot_mapping[tokens],
        host_query_lens=query_lens,
        host_kv_lens=kv_lens,
    )
