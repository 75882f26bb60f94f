"""Families of models, and the notations that their published chat templates use.

`detect` finds the notations of a model in its own template; this table says what it finds. A test holds every row
against lines of the template of its example.
"""

import msgspec


class Family(msgspec.Struct, frozen=True):
    """Models with the same notations; None where the published template has none."""

    models: str
    tools: str | None
    reasoning: str | None
    example: str
    """Model whose published template, or encoder in its place, was read."""
    architectures: tuple[str, ...] = ()
    """Architectures in config.json, if the scheduler has modules for them."""


_LLAMA = ("LlamaForCausalLM",)
_LLAMA4 = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
_QWEN2 = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")
_QWEN2_VL = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
_QWEN3_VL = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
_QWEN3 = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_QWEN35 = (
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
)
_LFM2 = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
_MISTRAL = ("MistralForCausalLM",)
_MISTRAL3 = (*_MISTRAL, "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
_KIMI = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
_GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_GEMMA3N = "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"
_GEMMA4 = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
_SEEING = (
    *("Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration"),
    *("LlavaForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"),
    *("Qwen2AudioForConditionalGeneration", "SmolVLMForConditionalGeneration"),
)
_PHI = ("Phi3ForCausalLM",)
_GRANITE = ("GraniteForCausalLM",)
_NEMOTRON = ("NemotronHForCausalLM",)
_OLMO_HYBRID = ("OlmoHybridForCausalLM",)
_DEEPSEEK_V2 = ("DeepseekV2ForCausalLM",)
_DEEPSEEK_V3 = ("DeepseekV3ForCausalLM",)

FAMILIES = (
    Family("Llama 2, Llama 3", None, None, "meta-llama/Meta-Llama-3-8B-Instruct", ("LLaMAForCausalLM", *_LLAMA)),
    Family("Llama 3.1, 3.2, 3.3", "llama3_json", None, "meta-llama/Llama-3.1-8B-Instruct", _LLAMA),
    Family("Llama 4", "llama_pythonic", None, "meta-llama/Llama-4-Scout-17B-16E-Instruct", _LLAMA4),
    Family("Hermes 2 Pro, Hermes 3, Hermes 4", "hermes", None, "NousResearch/Hermes-2-Pro-Llama-3-8B", _LLAMA),
    Family(
        "Llama Nemotron Super 1.5, Nemotron Nano 2",
        "nemotron",
        "qwen3",
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        (*_LLAMA, *_NEMOTRON),
    ),
    Family("Qwen2, Qwen2-MoE, Qwen2.5", "hermes", None, "Qwen/Qwen2.5-7B-Instruct", _QWEN2),
    Family("Qwen2-VL, Qwen2.5-VL", None, None, "Qwen/Qwen2.5-VL-7B-Instruct", _QWEN2_VL),
    Family(
        "Qwen3, Qwen3-VL, Qwen3-MoE, Qwen3-Next",
        "hermes",
        "qwen3",
        "Qwen/Qwen3-8B",
        (*_QWEN3, *_QWEN3_VL, "Qwen3NextForCausalLM"),
    ),
    Family("Qwen3-Coder", "qwen3_coder", None, "Qwen/Qwen3-Coder-30B-A3B-Instruct", _QWEN3),
    Family(
        "Qwen3.5, MiMo-V2, Step 3.5",
        "qwen3_coder",
        "qwen3",
        "Qwen/Qwen3.5-27B",
        (*_QWEN35, "MiMoV2FlashForCausalLM"),
    ),
    Family("Nemotron 3", "qwen3_coder", "qwen3", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _NEMOTRON),
    Family("Mistral 7B 0.1 and 0.2, Mixtral 8x7B", None, None, "mistralai/Mixtral-8x7B-Instruct-v0.1", _MISTRAL),
    Family(
        "Mistral 7B 0.3, Mixtral 8x22B, Mistral Nemo, Mistral Small 3.1, Voxtral",
        "mistral_array",
        None,
        "mistralai/Mistral-7B-Instruct-v0.3",
        (*_MISTRAL, "MixtralForCausalLM", "VoxtralForConditionalGeneration"),
    ),
    Family(
        "Mistral Small 3.2, Ministral 3", "mistral", None, "mistralai/Mistral-Small-3.2-24B-Instruct-2506", _MISTRAL3
    ),
    Family("Magistral", "mistral", "mistral", "mistralai/Magistral-Small-2509", (*_MISTRAL3, "Mistral4ForCausalLM")),
    Family(
        "Gemma 2, Gemma 3, Gemma 3n, T5Gemma",
        None,
        None,
        "google/gemma-3-4b-it",
        ("Gemma2ForCausalLM", *_GEMMA3, *_GEMMA3N, "T5GemmaForConditionalGeneration"),
    ),
    Family("FunctionGemma", "functiongemma", None, "google/functiongemma-270m-it", _GEMMA3),
    Family("Gemma 4", "gemma4", "gemma4", "google/gemma-4-31B-it", _GEMMA4),
    Family("Phi-3, Phi-3.5, Phi-4", None, None, "microsoft/phi-4", _PHI),
    Family("Phi-4-mini", "phi4_mini", None, "microsoft/Phi-4-mini-instruct", _PHI),
    Family("Phi-4-reasoning", None, "qwen3", "microsoft/Phi-4-reasoning", _PHI),
    Family("Seed-OSS", "seed_oss", "seed_oss", "ByteDance-Seed/Seed-OSS-36B-Instruct", ("SeedOssForCausalLM",)),
    Family("GLM-4 of 2024, GLM-4-0414", "glm4", None, "zai-org/glm-4-9b-chat-hf", ("GlmForCausalLM",)),
    Family("GLM-4.5, GLM-4.6", "glm", "qwen3", "zai-org/GLM-4.5", ("Glm4MoeForCausalLM",)),
    Family("GLM-4.7", "glm47", "qwen3", "zai-org/GLM-4.7", ("Glm4MoeForCausalLM",)),
    Family("GLM-4.7-Flash", "glm47", "qwen3", "zai-org/GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",)),
    Family("ERNIE 4.5", None, None, "baidu/ERNIE-4.5-0.3B-PT", ("Ernie4_5ForCausalLM",)),
    Family("ERNIE 4.5 Thinking", "hermes", "granite", "baidu/ERNIE-4.5-21B-A3B-Thinking"),
    Family("SmolLM3", "hermes", "qwen3", "HuggingFaceTB/SmolLM3-3B", ("SmolLM3ForCausalLM",)),
    Family("Granite 3.0, 3.1", "granite", None, "ibm-granite/granite-3.1-8b-instruct", _GRANITE),
    Family("Granite 3.2", "granite", "granite_32", "ibm-granite/granite-3.2-8b-instruct", _GRANITE),
    Family("Granite 3.3", "granite", "granite", "ibm-granite/granite-3.3-8b-instruct", _GRANITE),
    Family("Granite 4", "hermes", None, "ibm-granite/granite-4.0-micro", (*_GRANITE, "GraniteMoeHybridForCausalLM")),
    Family("gpt-oss", "gpt_oss", "gpt_oss", "openai/gpt-oss-20b", ("GptOssForCausalLM",)),
    Family("dots.llm1", None, None, "rednote-hilab/dots.llm1.inst", ("Dots1ForCausalLM",)),
    Family("MiniMax-M2", "minimax_m2", "qwen3", "MiniMaxAI/MiniMax-M2", ("MiniMaxM2ForCausalLM",)),
    Family("OLMo 2, OLMoE", None, None, "allenai/OLMoE-1B-7B-0924-Instruct", ("OlmoeForCausalLM",)),
    Family("OLMo 3, OLMo-Hybrid", "olmo3", None, "allenai/Olmo-3-7B-Instruct", _OLMO_HYBRID),
    Family("OLMo 3 Think, OLMo-Hybrid Think", "olmo3", "qwen3", "allenai/Olmo-3-7B-Think", _OLMO_HYBRID),
    Family("DeepSeek-V2", None, None, "deepseek-ai/DeepSeek-V2-Chat", _DEEPSEEK_V2),
    Family("DeepSeek-V2.5, DeepSeek-V3", "deepseek_v3", None, "deepseek-ai/DeepSeek-V3-0324", _DEEPSEEK_V3),
    Family("DeepSeek-R1", "deepseek_v3", "deepseek_r1", "deepseek-ai/DeepSeek-R1", _DEEPSEEK_V3),
    Family("DeepSeek-V3.1", "deepseek_v31", "qwen3", "deepseek-ai/DeepSeek-V3.1", _DEEPSEEK_V3),
    Family("DeepSeek-V3.2", "deepseek_v32", "qwen3", "deepseek-ai/DeepSeek-V3.2"),
    Family("DeepSeek-V4", "deepseek_v4", "qwen3", "deepseek-ai/DeepSeek-V4-Pro"),
    Family(
        "Kimi K2, Kimi-Linear",
        "kimi_k2",
        None,
        "moonshotai/Kimi-K2-Instruct",
        (*_DEEPSEEK_V3, "KimiLinearForCausalLM"),
    ),
    Family("Kimi K2 Thinking, Kimi K2.5", "kimi_k2", "kimi_k2", "moonshotai/Kimi-K2-Thinking", _KIMI),
    Family("Command R7B, Command A (Cohere 2)", "cohere", "cohere", "CohereForAI/c4ai-command-r7b-12-2024"),
    Family("Command R and Command R+ of 2024", None, None, "CohereForAI/c4ai-command-r-plus"),
    Family("Apertus", "apertus", "apertus", "swiss-ai/Apertus-8B-Instruct-2509"),
    Family("LFM2, LFM2-MoE", "lfm2", None, "LiquidAI/LFM2-1.2B", _LFM2),
    Family("LFM2.5", "lfm2", "qwen3", "LiquidAI/LFM2.5-8B-A1B", _LFM2),
    Family("Falcon-H1", "hermes", None, "tiiuae/Falcon-H1-7B-Instruct", ("FalconH1ForCausalLM",)),
    Family("Hunyuan", "hunyuan", "hunyuan", "tencent/Hunyuan-A13B-Instruct"),
    Family("Jamba", "hunyuan", None, "ai21labs/AI21-Jamba-1.5-Mini"),
    Family("Step 3", "step3", "qwen3", "stepfun-ai/step3"),
    Family("InternLM 2.5, InternLM 3", "internlm", None, "internlm/internlm2_5-7b-chat"),
    Family(
        "xLAM, GPT-NeoX, Starcoder2, GPT-2, Falcon-Mamba, Llava, Pixtral, InternVL, SmolVLM, Qwen2-Audio",
        None,
        None,
        "Salesforce/Llama-xLAM-2-8b-fc-r",
        (*_SEEING, "FalconMambaForCausalLM"),
    ),
)
