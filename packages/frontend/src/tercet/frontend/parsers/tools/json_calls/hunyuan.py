"""Hunyuan and Jamba: a JSON array between `<tool_calls>` tags.

Source: the chat templates of tencent/Hunyuan-A13B-Instruct and ai21labs/AI21-Jamba-1.5-Mini.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<tool_calls>[",
        prefix='{"name": "$name", "arguments": ',
        suffix="}",
        separator=", ",
        end="]</tool_calls>",
        trigger="<tool_calls>",
    ),
    grammar=marked_json(("<tool_calls>",), ("</tool_calls>",)),
)
