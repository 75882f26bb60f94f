"""Qwen3-Coder, Qwen 3.5, MiMo-V2, Nemotron 3 and Step 3.5: `<function=name>` in `<tool_call>` tags.

Source: the chat template and tool parser of Qwen/Qwen3-Coder-480B-A35B-Instruct.
"""

from tercet.frontend.parsers.tools.tagged.function_tags import FunctionTags, function_format

FORMAT = function_format(FunctionTags(begin="<tool_call>", end="</tool_call>", breaks=True))
