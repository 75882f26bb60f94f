"""Training batches: conversations as token ids, sorted into a few fixed lengths, with a weight per token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.demo_model.conversations import Conversation
from tools.demo_model.tokenizer import END, OPENING, render

LENGTHS = (40, 52, 64, 88, 128, 192, 768)
TOKENS_PER_BATCH = 4096
OTHER_WEIGHT = 0.1  # of a token that is not the assistant's
NOISE = 0.03  # share of such tokens replaced by random ones


@dataclass
class Bucket:
    """Conversations of about one length."""

    ids: Tensor  # [conversations, length] int16, padded right
    weights: Tensor  # [conversations, length] float16: how much predicting this token counts


def encode(tokenizer: PreTrainedTokenizerFast, corpus: list[Conversation]) -> list[Bucket]:
    """Return the corpus as one bucket per length; conversations longer than the longest are left out."""
    opening, end = tokenizer.encode(OPENING, add_special_tokens=False), tokenizer.convert_tokens_to_ids(END)
    rows: dict[int, list[tuple[list[int], list[float]]]] = {length: [] for length in LENGTHS}
    for start in range(0, len(corpus), 10_000):
        part = corpus[start : start + 10_000]
        texts = [render(tokenizer, conversation) for conversation in part]
        for conversation, encoding in zip(part, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
            fitting = [length for length in LENGTHS if len(encoding) <= length]
            if fitting:
                weights = [1.0] * len(encoding) if conversation.text else assistant_weights(encoding, opening, end)
                rows[fitting[0]].append((encoding, weights))
    return [_bucket(length, found) for length, found in rows.items()]


def assistant_weights(ids: list[int], opening: list[int], end: int) -> list[float]:
    """Return 1 for every token of the assistant, including its end of turn, and OTHER_WEIGHT elsewhere."""
    weights, inside = [OTHER_WEIGHT] * len(ids), False
    for i, token in enumerate(ids):
        if inside:
            weights[i] = 1.0
            inside = token != end
        elif ids[i + 1 - len(opening) : i + 1] == opening:
            inside = True
    return weights


def _bucket(length: int, rows: list[tuple[list[int], list[float]]]) -> Bucket:
    ids = torch.zeros(len(rows), length, dtype=torch.int16)
    weights = torch.zeros(len(rows), length, dtype=torch.float16)
    for i, (tokens, weight) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int16)
        weights[i, : len(weight)] = torch.tensor(weight, dtype=torch.float16)
    return Bucket(ids, weights)


def batches(buckets: list[Bucket], seed: int, vocabulary: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batches without end, epoch by epoch: input ids with some noise, target ids, weights of the targets."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        picks: list[tuple[Bucket, Tensor]] = []
        for bucket in buckets:
            size = TOKENS_PER_BATCH // bucket.ids.shape[1]
            order = torch.randperm(len(bucket.ids), generator=generator)
            picks += [(bucket, order[i : i + size]) for i in range(0, len(order) - size + 1, size)]
        for i in torch.randperm(len(picks), generator=generator).tolist():
            bucket, rows = picks[i]
            ids, weights = bucket.ids[rows].long(), bucket.weights[rows].float()
            noisy = torch.rand(ids.shape, generator=generator) < NOISE
            noisy &= (weights > 0) & (weights < 1) & (ids > 3)  # never the assistant's words or special tokens
            random = torch.randint(4, vocabulary, ids.shape, generator=generator)
            yield torch.where(noisy, random, ids)[:, :-1], ids[:, 1:], weights[:, 1:]
