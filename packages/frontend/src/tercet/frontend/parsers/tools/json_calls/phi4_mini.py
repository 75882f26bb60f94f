"""Phi-4-mini: JSON between `<|tool_call|>` and `<|/tool_call|>`, or an array after `functools`.

Source: the chat template and model card of microsoft/Phi-4-mini-instruct, and vLLM's template for it, which asks for
`functools[...]`. `functools` without a call after it is text.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<|tool_call|>[",
        prefix='{"name": "$name", "arguments": ',
        suffix="}",
        separator=", ",
        end="]<|/tool_call|>",
        trigger="<|tool_call|>",
        extra_patterns=(r"functools\s*[\[{]",),
        special_tokens=True,
    ),
    grammar=marked_json(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
)
