"""`<think>` and `</think>`: DeepSeek R1, Qwen 3 and models with the same notation.

Source: the chat templates of deepseek-ai/DeepSeek-R1 (whose prompt opens the reasoning), Qwen/Qwen3-8B (the model
opens it; with `enable_thinking` false the prompt opens and closes it), Qwen/Qwen3-30B-A3B-Thinking-2507,
deepseek-ai/DeepSeek-V3.1, zai-org/GLM-4.5 and moonshotai/Kimi-K2-Thinking. In Kimi's answers calls may end reasoning
that was not closed, as in vLLM's parser.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

DEEPSEEK_R1 = tagged(Tags(begin="<think>", end="</think>", always=True))
QWEN3 = tagged(Tags(begin="<think>", end="</think>"))
KIMI_K2 = tagged(
    Tags(begin="<think>", end="</think>", extra_ends=("<|tool_calls_section_begin|>",), special_tokens=True)
)
