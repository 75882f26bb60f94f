"""Command R7B, Command A and later: a JSON array between `<|START_ACTION|>` and `<|END_ACTION|>`.

Source: the chat template for tools of CohereForAI/c4ai-command-r7b-12-2024. The model numbers its calls; the template
numbers them itself, so the numbers are not passed on as ids.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<|START_ACTION|>[\n",
        prefix='    {"tool_call_id": "$index", "tool_name": "$name", "parameters": ',
        suffix="}",
        separator=",\n",
        end="\n]<|END_ACTION|>",
        trigger="<|START_ACTION|>",
        special_tokens=True,
    ),
    grammar=marked_json(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
)
