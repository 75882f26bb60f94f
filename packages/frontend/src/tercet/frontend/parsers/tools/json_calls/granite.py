"""Granite 3: `<|tool_call|>` before a JSON array of calls. There is no end marker.

Source: the chat templates of ibm-granite/granite-3.0-8b-instruct to granite-3.3-8b-instruct. Granite 3.1 writes
`<tool_call>`, as vLLM's parser reads, too.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<|tool_call|>[",
        prefix='{"name": "$name", "arguments": ',
        suffix="}",
        separator=", ",
        end="]",
        trigger="<|tool_call|>",
        extra_begins=("<tool_call>",),
        special_tokens=True,
    ),
    grammar=marked_json(("<|tool_call|>", "<tool_call>")),
)
