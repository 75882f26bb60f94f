"""Times of the tokens of a text in its audio clip, by heads of cross-attention that follow the audio.

A head's weights say for each token which positions of the clip it attends to. They are normalized over the tokens,
smoothed over the positions, and averaged over the heads. Dynamic time warping
(https://doi.org/10.1109/TASSP.1978.1163055) finds the path of the largest sum on which neither tokens nor positions go
back.

The query of a token looks for the token after it. So a token ends where its own part of the path begins.

The text is the prompt of a request of its own (`Transcript.TIMES`): steps that generate text have no part in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from tercet.protocol.messages.audio import AudioFormat, Transcript, TranscriptTokens
from tercet.protocol.messages.values import pack_floats
from tercet.scheduler.core.plan import Row, SlotInit
from tercet.scheduler.models.audio.audio_model import Alignment

Costs = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
_BOTH, _TOKEN, _POSITION = range(3)
"""Steps of a path: to the next token and the next position at once, or to one of them."""


@dataclass
class _Text:
    """Text of a slot: tokens [first, last) of its prompt."""

    first: int
    last: int
    queries: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Queries [tokens, heads, head_dim] by layer, of one run of tokens after another."""


class _Part(NamedTuple):
    """Tokens of a step that are of a slot's text."""

    text: _Text
    tokens: slice


class TokenTimes:
    """Queries of the texts whose times are wanted, until a text is computed whole."""

    def __init__(self, alignment: Alignment, form: AudioFormat) -> None:
        self._alignment = alignment
        self._form = form
        self._heads: dict[int, list[int]] = {}
        for layer, head in alignment.heads:
            self._heads.setdefault(layer, []).append(head)
        self._texts: dict[int, _Text] = {}
        self._parts: list[_Part] = []

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Note the texts of choices that take slots."""
        for init in inits:
            self._texts.pop(init.slot, None)
            if init.audio is not None and init.audio.transcript is Transcript.TIMES:
                ids = np.frombuffer(init.tokens, np.int32)[: init.prompt_tokens]
                self._texts[init.slot] = _Text(_first_of_text(ids.tolist(), self._form.tokens), len(ids))

    def begin(self, rows: Sequence[Row]) -> bool:
        """Prepare for the queries of a step. Return whether any are wanted."""
        self._parts = []
        offset = 0
        for row in rows:
            text = self._texts.get(row.slot)
            if text is not None:
                first, last = max(text.first, row.start), min(text.last, row.start + row.count)
                if first < last:
                    self._parts.append(_Part(text, slice(offset + first - row.start, offset + last - row.start)))
            offset += row.count
        return bool(self._parts)

    def record(self, layer_id: int, queries: torch.Tensor) -> None:
        """Note the scaled queries [tokens, heads, head_dim] of a step's layer."""
        if layer_id in self._heads:
            for part in self._parts:
                own = queries[part.tokens, self._heads[layer_id]].float()
                part.text.queries.setdefault(layer_id, []).append(own)

    def of(self, row: Row, keys: Callable[[int], torch.Tensor], samples: int) -> Callable[[], bytes] | None:
        """Return the function that computes `Logprobs.times` of a row that ends its text; None for any other row.

        `keys` returns a layer's keys [positions, heads, head_dim] of the row's audio clip, which has so many samples.
        """
        text = self._texts.get(row.slot)
        if text is None or row.start + row.count < text.last:
            return None
        del self._texts[row.slot]
        if not text.queries:
            return None
        seconds = self._form.tokens.timestamp_seconds
        positions = max(1, int(samples / self._form.rate / seconds))
        weights = []
        for layer, parts in text.queries.items():
            scores = torch.einsum("thd,phd->htp", torch.cat(parts), keys(layer)[:, self._heads[layer]].float())
            weights.append(scores.softmax(-1)[..., :positions])
        alignment = aligned(torch.cat(weights), self._alignment.median)
        return partial(_times, alignment, seconds)


def _first_of_text(ids: Sequence[int], tokens: TranscriptTokens) -> int:
    """Return the index of the first token after those that name the language and the task."""
    named = {tokens.transcribe, tokens.translate, tokens.no_timestamps, *tokens.languages.values()}
    first = len(ids) - 1 - ids[::-1].index(tokens.start) + 1 if tokens.start in ids else 0
    while first < len(ids) and ids[first] in named:
        first += 1
    return first


def aligned(weights: torch.Tensor, median: int) -> torch.Tensor:
    """Return the alignment [tokens, positions] by the weights [heads, tokens, positions]."""
    deviation, mean = torch.std_mean(weights, dim=1, correction=0, keepdim=True)
    normal = ((weights - mean) / deviation).nan_to_num(0.0)  # a position that all tokens see alike
    total = torch.zeros_like(normal[0])
    for own in normal:  # a head at a time stays in the processor's cache
        total += _median(own, median)
    return total / len(normal)


def _median(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the medians of values [tokens, positions] over so many positions, which are reflected at the ends.

    Sorting as many short rows would take five times as long as to sort whole tensors, as far as their middle.
    """
    margin, positions = width // 2, values.shape[-1]
    if positions <= margin:
        return values
    padded = F.pad(values, (margin, margin), mode="reflect")
    shifted = [padded[..., place : place + positions] for place in range(width)]
    for last in range(width - 1, margin - 1, -1):  # the largest of those left goes to the end
        for place in range(last):
            one, other = shifted[place], shifted[place + 1]
            shifted[place], shifted[place + 1] = torch.minimum(one, other), torch.maximum(one, other)
    return shifted[margin]


def _times(alignment: torch.Tensor, seconds: float) -> bytes:
    return pack_floats((first_positions(-alignment.cpu().numpy()) * seconds).tolist())


def first_positions(costs: Costs) -> Integers:
    """Return the first position of each token on the cheapest path through costs [tokens, positions].

    The cheapest sums are computed for one diagonal of the matrix at a time, whose entries need only the two diagonals
    before.
    """
    tokens, positions = costs.shape
    steps = np.zeros((tokens + positions - 1, tokens), dtype=np.uint8)  # how the path comes to [diagonal, token]
    before, last = (np.full(tokens + 1, np.inf, dtype=np.float32) for _ in range(2))  # a border, then tokens
    before[0] = 0.0
    for diagonal in range(tokens + positions - 1):
        own = np.arange(max(0, diagonal - positions + 1), min(tokens, diagonal + 1))
        ways = np.stack([before[own], last[own], last[own + 1]])  # _BOTH, _TOKEN, _POSITION
        both, token, position = ways
        step = np.where((both < token) & (both < position), _BOTH, np.where((token < both) & (token < position), 1, 2))
        sums = costs[own, diagonal - own].astype(np.float64) + ways[step, np.arange(len(own))]
        steps[diagonal, own] = step
        before, last = last, np.full(tokens + 1, np.inf, dtype=np.float32)
        last[own + 1] = sums
    firsts = np.zeros(tokens, dtype=np.int64)
    token, position = tokens - 1, positions - 1
    while token >= 0 and position >= 0:
        firsts[token] = position
        step = steps[token + position, token]
        token -= step != _POSITION
        position -= step != _TOKEN
    return firsts
