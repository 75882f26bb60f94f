"""Seed-OSS: `<function=name>` in `<seed:tool_call>` tags, with values that have no line breaks around them.

Source: the chat template of ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from tercet.frontend.parsers.tools.tagged.function_tags import FunctionTags, function_format

FORMAT = function_format(FunctionTags(begin="<seed:tool_call>", end="</seed:tool_call>", breaks=False))
