"""The registry of decoders: the module of each architecture."""

import importlib
from typing import TYPE_CHECKING

import torch

from tercet.scheduler.models.config.architectures import ARCHITECTURES
from tercet.scheduler.models.layers.shard import WHOLE, Shard

if TYPE_CHECKING:
    from tercet.scheduler.models.config.model_config import ModelConfig
    from tercet.scheduler.models.layers.decoder import CausalLM


def build_model(config: "ModelConfig", device: torch.device | str = "cpu", shard: Shard = WHOLE) -> "CausalLM":
    """Build the model of a config on a device, without loaded weights."""
    module = importlib.import_module(f"tercet.scheduler.models.families.{ARCHITECTURES[config.architecture]}")
    with torch.device(device):
        model: CausalLM = module.build(config, shard)
    return model.eval()
