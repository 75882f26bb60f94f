"""Hermes, Qwen 2.5, Qwen 3, SmolLM3, ERNIE 4.5 and Granite 4: a JSON object between `<tool_call>` tags.

Source: the chat templates of NousResearch/Hermes-2-Pro-Llama-3-8B, Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-8B,
HuggingFaceTB/SmolLM3-3B, baidu/ERNIE-4.5-21B-A3B-Thinking and ibm-granite/granite-4.0-micro.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix='<tool_call>\n{"name": "$name", "arguments": ',
        suffix="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    ),
    grammar=marked_json(("<tool_call>",), ("</tool_call>",)),
)
