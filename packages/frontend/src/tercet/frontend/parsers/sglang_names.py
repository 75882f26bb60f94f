"""SGLang's names of parsers that have another name here. Names in neither table are the same, or unknown."""

TOOL_PARSERS = {
    "apertus2509": "apertus",
    "cohere_command4": "cohere",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm45": "glm",
    "gpt-oss": "gpt_oss",
    "llama3": "llama3_json",
    "mimo": "qwen3_coder",
    "minimax-m2": "minimax_m2",
    "pythonic": "llama_pythonic",
    "qwen": "hermes",
    "qwen25": "hermes",
    "step3p5": "qwen3_coder",
}
REASONING_PARSERS = {
    "apertus2509": "apertus",
    "cohere_command4": "cohere",
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "qwen3",
    "deepseek-v4": "qwen3",
    "glm45": "qwen3",
    "gpt-oss": "gpt_oss",
    "granite_thinking_parser": "granite",
    "minimax": "qwen3",
    "qwen3-thinking": "qwen3",
    "step3": "qwen3",
    "step3p5": "qwen3",
}
