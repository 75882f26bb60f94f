"""What a trial finds out about a model, of which there is little more here than its attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.smoke_test import run_smoke_test
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.model_config import DecoderShape
from tercet.scheduler.models.trial_text import LONGEST, text_length, trial_text

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
TEXT = trial_text(24, 40)
CPU = torch.device("cpu")


class Attends:
    """A model of two layers, each of which is attention over what was embedded, or over what came out of the first."""

    layers: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(40, 32, generator=draw)
        self.head = torch.randn(40, 32, generator=draw)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = self.embedded(input_ids, positions)
        for layer in self.layers:
            heads = x.view(-1, 4, 8)
            x = x + batch.attend(layer, heads, heads[:, :2], heads[:, 2:], AttentionParams(scale=0.3)).flatten(1)
        return x

    def embedded(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.embedding[input_ids] + (positions[:, None] / 10).to(self.embedding.dtype)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T

    def plain(self, text: torch.Tensor, first: int = 0, window: int = 0, later: bool = False) -> torch.Tensor:
        """What the model is meant to give: with attention of torch."""
        places = torch.arange(len(text))
        back = places[:, None] - places
        seen = (back >= 0) & (back < (window or len(text))) | (torch.tensor(later) & (back < 0))
        x = self.embedded(text, places + first)
        for _ in (0, 1):
            q = x.view(-1, 4, 8).transpose(0, 1)
            k, v = (half.repeat_interleave(2, 0) for half in (q[:2], q[2:]))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3)
            x = x + out.transpose(0, 1).flatten(1)
        return self.compute_logits(x)


class Recalls(Attends):
    """Adds to each token what came before it in the same step, as a convolution over tokens does."""

    def embedded(self, *given: torch.Tensor) -> torch.Tensor:
        embedded = super().embedded(*given)
        return torch.nn.functional.pad(embedded, (0, 0, 1, 0))[:-1] + embedded


class Twice(Attends):
    layers = (0, 0, 1)


class Broken(Attends):
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T * float("nan")


class Strict(Attends):
    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: object) -> torch.Tensor:
        raise TypeError("no such\nkeyword")


def test_a_model_that_gives_what_its_plain_forward_gives_may_serve() -> None:
    model = Attends()
    run_smoke_test(model, SHAPE, model.plain, TEXT)
    run_smoke_test(model, SHAPE, model.plain, TEXT[:1])
    half = Attends()
    half.embedding, half.head = half.embedding.bfloat16(), half.head.bfloat16()
    run_smoke_test(half, replace(SHAPE, dtype=torch.bfloat16), half.plain, TEXT)


@pytest.mark.parametrize(
    ("plain", "where"),
    [
        ({"first": 2}, "in the first chunk of a text"),
        ({"window": 3}, "in the first chunk of a text"),
        ({"window": 9}, "in a later chunk, beside another text"),
        ({"later": True}, "in the first chunk of a text"),
    ],
)
def test_another_text_than_that_of_the_plain_forward_is_refused(plain: dict[str, Any], where: str) -> None:
    model = Attends()
    with pytest.raises(ModelError, match=f"AnyForCausalLM cannot be served: {where} its logits are .*% off"):
        run_smoke_test(model, SHAPE, lambda text: model.plain(text, **plain), TEXT)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (Recalls(), {}, "in a later chunk, beside another text its logits are .*% off"),
        (Twice(), {}, r"attends in layers \[0, 0, 1\] of 2"),
        (Attends(), {"layers": 3}, r"attends in layers \[0, 1\] of 3"),
        (Attends(), {"kv_heads": 4}, r"layer 0 has keys \[2, 8\], not \[4, 8\]"),
        (Attends(), {"head_dim": 16}, r"layer 0 has keys \[2, 8\], not \[2, 16\]"),
        (Attends(), {"vocab_size": 39}, r"has logits \[24, 40\] for 24 tokens of 39 kinds"),
        (Broken(), {}, "its logits are nan% off"),
        (Strict(), {}, "cannot run over a paged cache: no such keyword$"),
    ],
)
def test_what_cannot_serve_is_refused(model: Attends, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run_smoke_test(model, replace(SHAPE, **changes), model.plain, TEXT)


def test_texts_are_as_long_as_is_cheap() -> None:
    gpu = torch.device("cuda")
    assert text_length(10**6, 4096, CPU) == text_length(10**12, 4096, gpu) == LONGEST
    assert 12 < text_length(2 * 10**9, 4096, CPU) < LONGEST
    assert text_length(10**12, 4096, CPU) == 12
    assert text_length(10**6, 20, CPU) == 20


def test_texts_leave_out_tokens_that_mean_something() -> None:
    assert not {*trial_text(96, 40, without={0, 1, 7}).tolist()} & {0, 1, 7}
    assert len(trial_text(5, 2, without={0, 1})) == 5
