"""A model without its worker: loaded from a checkpoint, and what it says to a prompt."""

from pathlib import Path

import torch

from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.packed import Packed
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights


def load(directory: Path, *, dequantized: bool = False) -> CausalLM:
    model = build_model(load_config(directory))
    load_weights(model, directory, dequantized=dequantized)
    return model


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    """[40, vocabulary], of the tokens 0 to 39 as one prompt."""
    tokens = torch.arange(40)
    batch = Packed(tokens, None, [40], causal=True)
    return model.compute_logits(model(tokens, batch.positions, batch))
