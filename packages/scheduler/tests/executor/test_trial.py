"""What a trial finds out about a model, of which there is little more here than its attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.model_config import DecoderShape
from tercet.scheduler.executor.trial import try_out
from tercet.scheduler.model_files import ModelError

SHAPE = DecoderShape(
    architecture="AnyForCausalLM",
    layers=2,
    kv_heads=2,
    head_dim=8,
    vocab_size=40,
    context_length=64,
    eos_token_ids=(),
    dtype=torch.float32,
)
CPU = torch.device("cpu")


class Attends:
    """A model of two layers, each of which is attention over what was embedded, or over what came out of the first."""

    layers: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(40, 32, generator=draw)
        self.head = torch.randn(40, 32, generator=draw)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedding[input_ids] + (positions[:, None] / 10).to(self.embedding.dtype)
        for layer in self.layers:
            heads = x.view(-1, 4, 8)
            x = x + batch.attend(layer, heads, heads[:, :2], heads[:, 2:], scale=0.3).flatten(1)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


class Recalls(Attends):
    """Adds to each token what came before it in the same step, as a convolution over tokens does."""

    def __call__(self, *given: Any) -> torch.Tensor:
        hidden = super().__call__(*given)
        return torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:-1] + hidden


class Twice(Attends):
    layers = (0, 0, 1)


class Broken(Attends):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float("nan")


class Strict(Attends):
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: object) -> torch.Tensor:
        raise TypeError("no such keyword")


def test_a_model_that_keeps_keys_and_values_alone_may_serve() -> None:
    try_out(Attends(), SHAPE, CPU)
    with torch.inference_mode():
        half = Attends()
        half.embedding, half.head = half.embedding.bfloat16(), half.head.bfloat16()
        try_out(half, replace(SHAPE, dtype=torch.bfloat16), CPU)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (Recalls(), {}, "AnyForCausalLM keeps more of a text than keys and values"),
        (Twice(), {}, r"attends in layers \[0, 0, 1\] of 2"),
        (Attends(), {"layers": 3}, r"attends in layers \[0, 1\] of 3"),
        (Attends(), {"kv_heads": 4}, r"layer 0 has keys \[2, 8\], not \[4, 8\]"),
        (Attends(), {"head_dim": 16}, r"layer 0 has keys \[2, 8\], not \[2, 16\]"),
        (Attends(), {"vocab_size": 39}, r"has logits \[1, 40\] for 39 tokens"),
        (Broken(), {}, r"has logits \[1, 32\]"),
        (Strict(), {}, "cannot run over a paged cache: no such keyword"),
    ],
)
def test_what_cannot_serve_is_refused(model: Attends, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        try_out(model, replace(SHAPE, **changes), CPU)
