"""Architectures that are implemented here, by their names in config.json."""

from collections.abc import Mapping
from typing import Any

from tercet.scheduler.model_files import ModelError

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
"""The module in `families` of each architecture, whose `build(config, shard)` makes the model."""


def named_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names. Raise ModelError if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("config.json: architectures: must name the model's architecture")
    return str(names[0])


def is_ours(architecture: str) -> bool:
    """Return whether an architecture is implemented here."""
    return architecture in ARCHITECTURES


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names. Raise ModelError if it is not implemented here."""
    name = named_architecture(config)
    if not is_ours(name):
        raise ModelError(f"config.json: architectures: {name!r} is not one of {', '.join(ARCHITECTURES)}")
    return name
