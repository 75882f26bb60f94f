"""Which module runs which architecture."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.shard import WHOLE, Shard

if TYPE_CHECKING:
    from tercet.scheduler.models.config.model_config import ModelConfig
    from tercet.scheduler.models.decoder import CausalLM

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Dots1ForCausalLM": "qwen3",
    "Ernie4_5ForCausalLM": "llama",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma",
    "Gemma3ForConditionalGeneration": "gemma",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mistral",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Each architecture's module in this package, whose `build(config, shard)` makes the model."""


def named_architecture(config: Mapping[str, Any]) -> str:
    """The architecture that config.json names. Raises ModelError where it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("config.json: architectures: must name the model's architecture")
    return str(names[0])


def is_ours(architecture: str) -> bool:
    """Whether it is written here."""
    return architecture in ARCHITECTURES


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that config.json names. Raises ModelError for one that is not written here."""
    name = named_architecture(config)
    if not is_ours(name):
        raise ModelError(f"config.json: architectures: {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return name


def build_model(config: "ModelConfig", device: torch.device | str = "cpu", shard: Shard = WHOLE) -> "CausalLM":
    """The model of a config on a device, its weights not yet loaded."""
    module = importlib.import_module(f"tercet.scheduler.models.{ARCHITECTURES[config.architecture]}")
    with torch.device(device):
        model: CausalLM = module.build(config, shard)
    return model.eval()
