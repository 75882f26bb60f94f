"""Small random encoders, and what tests of them share."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tercet.protocol.messages.values import pack_ints, unpack_floats
from tercet.scheduler.core.embedding.plan import EncodePlan, EncodeRow
from tercet.scheduler.executor.encoder_worker import EncoderWorker

VOCAB_SIZE = 97
LENGTHS = [5, 1, 12, 5, 30, 12, 2, 19, 5]
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}

Make = Callable[..., tuple[Path, Any]]
"""Of an architecture, what is special of its config, and perhaps a dtype: a directory, and transformers' model."""


def maker(directory_for: Callable[[str], Path]) -> Make:
    """Makes random checkpoints, each in the directory for its architecture."""
    torch.set_num_threads(1)

    def build(architecture: str, extra: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Path, Any]:
        kind = getattr(transformers, architecture)
        config = kind.config_class(**{**SHAPE, **extra})
        with torch.random.fork_rng():
            torch.manual_seed(sum(architecture.encode()))
            model = kind(config).to(dtype).eval()
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name.lower():  # begun at 0 and 1, which would hide mistakes
                    torch.nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.2)
        directory = directory_for(architecture)
        model.save_pretrained(directory)
        return directory, model

    return build


def some_inputs(types: int = 1) -> list[EncodeRow]:
    chance = random.Random(3)
    rows = []
    for length in LENGTHS:
        ids = [chance.randrange(5, VOCAB_SIZE) for _ in range(length)]
        kinds = [min(place * 2 // length, types - 1) for place in range(length)] if types > 1 else []
        rows.append(EncodeRow(pack_ints(ids), pack_ints(kinds)))
    return rows


def vectors_of(worker: EncoderWorker, rows: Sequence[EncodeRow]) -> list[torch.Tensor]:
    result = worker.submit(EncodePlan(step=5, rows=list(rows))).result()
    assert (result.step, result.failed, result.too_large) == (5, [], [])
    width = worker.capacity.width
    numbers = torch.tensor(list(unpack_floats(result.vectors)))
    assert len(numbers) == width * len(rows)
    return list(numbers.view(len(rows), width))


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
