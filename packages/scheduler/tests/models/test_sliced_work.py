"""Encoders whose layers compute in parts give what they gave whole, and pause between the parts."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tercet.kernels.native.library import load_library
from tercet.scheduler.device import time_slices
from tercet.scheduler.device.time_slices import TimeSlices
from tercet.scheduler.models import sliced_work
from tercet.scheduler.models.native_linear import use_native_linears
from tercet.scheduler.models.sliced_work import slice_work


def siglip() -> nn.Module:
    config = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=4
    )
    config._attn_implementation = "sdpa"
    model: nn.Module = transformers.SiglipVisionModel(config).eval()
    return model.requires_grad_(False)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, max_source_positions=100
    )
    config._attn_implementation = "sdpa"
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    model: nn.Module = WhisperEncoder(config).eval()
    return model.requires_grad_(False)


MODELS: dict[str, Any] = {"siglip": (siglip, (2, 3, 56, 56)), "whisper": (whisper, (1, 80, 200))}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_parts_give_what_the_whole_gives(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    whole = model(x).last_hidden_state
    if native:
        use_native_linears(model, load_library())
    monkeypatch.setattr(time_slices, "_PART", 1)  # 16 rows a part
    slice_work(model)
    torch.testing.assert_close(model(x).last_hidden_state, whole, atol=1e-5, rtol=1e-5)


def test_every_layer_pauses_between_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = siglip()
    slice_work(model)
    x = torch.randn(1, 3, 56, 56)  # 196 patches

    def slices_of(part: float) -> int:
        monkeypatch.setattr(time_slices, "_PART", part)
        slices, count = TimeSlices(), 1
        while not slices.run(lambda: model(x), 0.0):
            count += 1
        slices.close()
        return count

    whole, parts = slices_of(1e12), slices_of(1)
    assert whole >= 2 * (6 + 1), "six linear layers and an attention in each of two layers"
    assert parts >= 10 * whole


def test_a_mask_is_cut_like_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(time_slices, "_PART", 1)
    q, k, v = (torch.randn(1, 2, 50, 8) for _ in range(3))
    mask = torch.randn(1, 1, 50, 50)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = siglip()
    whole, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=0.3, is_causal=False)
    parts, _ = sliced_work._attend(sdpa_attention_forward, module, q, k, v, mask, scaling=0.3)
    torch.testing.assert_close(parts, whole)
