"""Architectures that are implemented here, by their names in config.json. It imports no torch."""

from collections.abc import Mapping
from typing import Any

from tercet.scheduler.model_files import ModelError

MODULES = {
    "BertModel": "bert",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
    "CamembertModel": "bert",
    "ModernBertModel": "modernbert",
    "BartForConditionalGeneration": "encoder_decoder/bart",
    "BambaForCausalLM": "recurrent/granite_hybrid",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Dots1ForCausalLM": "qwen3",
    "Ernie4_5ForCausalLM": "llama",
    "Ernie4_5Model": "llama",
    "FalconH1ForCausalLM": "recurrent/falcon_h1",
    "FalconMambaForCausalLM": "recurrent/mamba",
    "Gemma2ForCausalLM": "gemma/gemma",
    "Gemma3ForCausalLM": "gemma/gemma",
    "Gemma3nForCausalLM": "gemma/gemma3n",
    "Gemma4ForCausalLM": "gemma/gemma4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "GlmForCausalLM": "glm",
    "GlmModel": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "llama",
    "GraniteModel": "llama",
    "GraniteMoeHybridForCausalLM": "recurrent/granite_hybrid",
    "KimiLinearForCausalLM": "recurrent/kimi_linear",
    "Lfm2ForCausalLM": "recurrent/lfm2",
    "Lfm2MoeForCausalLM": "recurrent/lfm2",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "LLaMAForCausalLM": "llama",
    "Mamba2ForCausalLM": "recurrent/mamba2",
    "MambaForCausalLM": "recurrent/mamba",
    "Llama4ForCausalLM": "llama4",
    "MBartForConditionalGeneration": "encoder_decoder/bart",
    "MiMoV2FlashForCausalLM": "mimo_v2",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "mistral",
    "MistralForCausalLM": "mistral",
    "MistralModel": "mistral",
    "Mistral4ForCausalLM": "deepseek",
    "MixtralForCausalLM": "mistral",
    "MixtralModel": "mistral",
    "NemotronHForCausalLM": "recurrent/nemotron_h",
    "OlmoHybridForCausalLM": "recurrent/olmo_hybrid",
    "OlmoeForCausalLM": "olmoe",
    "OlmoeModel": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Phi3Model": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2Model": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2",
    "Qwen2MoeModel": "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3",
    "Qwen3Model": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "Qwen3MoeModel": "qwen3",
    "Qwen3NextForCausalLM": "recurrent/qwen3_next",
    "Qwen3_5ForCausalLM": "recurrent/qwen3_next",
    "Qwen3_5MoeForCausalLM": "recurrent/qwen3_next",
    "SeedOssForCausalLM": "seed_oss",
    "SeedOssModel": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "SmolLM3Model": "smollm3",
    "T5GemmaForConditionalGeneration": "encoder_decoder/t5gemma",
    "WhisperForConditionalGeneration": "encoder_decoder/whisper",
}
"""The module of each architecture, as a path in `models/families`.

`XModel` stands for every architecture of X that gives vectors or scores, such as `XForSequenceClassification`. A model
that has only that is an encoder.
"""
_KIMI = {"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Idefics3ForConditionalGeneration": {"llama": "LlamaForCausalLM"},
    "InternVLForConditionalGeneration": {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "llama": "LlamaForCausalLM",
    },
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "KimiK25ForConditionalGeneration": _KIMI,
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "LlavaForConditionalGeneration": {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
    },
    "LlavaOnevisionForConditionalGeneration": {"qwen2": "Qwen2ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "Qwen2AudioForConditionalGeneration": {"qwen2": "Qwen2ForCausalLM"},
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2VLForConditionalGeneration"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3VLForConditionalGeneration"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "SmolVLMForConditionalGeneration": {"llama": "LlamaForCausalLM"},
    "VoxtralForConditionalGeneration": {"llama": "LlamaForCausalLM"},
}
"""Models that read more than text: the architecture of the text model by the `model_type` of its `text_config`.

The first is the default.
"""


def named_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that config.json names. Raise ModelError if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError("config.json: architectures: must name the model's architecture")
    return str(names[0])


def text_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture of the model that generates text, which a `WRAPPERS` config describes within.

    Raise ModelError if config.json names none.
    """
    name = named_architecture(config)
    known, text = WRAPPERS.get(name, {}), config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return known.get(kind, name) if isinstance(kind, str) else next(iter(known.values()), name)


def generators() -> list[str]:
    """Return the architectures that generate text."""
    return [name for name in dict.fromkeys((*MODULES, *WRAPPERS)) if not name.endswith("Model")]


def embedders() -> list[str]:
    """Return the beginnings of architectures that give vectors or scores, encoders first."""
    return [name.removesuffix("Model") for name in MODULES if name.endswith("Model")]


def is_ours(architecture: str) -> bool:
    """Return whether an architecture, not a wrapper, is implemented here and generates text."""
    return architecture in MODULES and not architecture.endswith("Model")


def is_encoder(prefix: str) -> bool:
    """Return whether architectures that begin with `prefix` give vectors or scores, but never text."""
    return prefix in embedders() and not is_ours(f"{prefix}ForCausalLM")


def is_decoder(prefix: str) -> bool:
    """Return whether architectures that begin with `prefix` give vectors or scores, and also text."""
    return prefix in embedders() and is_ours(f"{prefix}ForCausalLM")


def split_architecture(architecture: str) -> tuple[str, str]:
    """Split BertForSequenceClassification into ("Bert", "ForSequenceClassification"). An unknown family is ""."""
    for prefix in embedders():
        kind = architecture.removeprefix(prefix)
        if kind != architecture and kind.startswith(("For", "Model")):  # Llama4ForCausalLM is not of the family Llama
            return prefix, kind
    return "", architecture


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture of a text model. Raise ModelError if it generates no text here."""
    name = named_architecture(config)
    if not is_ours(name):
        raise ModelError(f"config.json: architectures: {name!r} is not one of {', '.join(generators())}")
    return name
