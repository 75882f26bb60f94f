"""InternLM 2.5 and 3: a JSON object between `<|action_start|><|plugin|>` and `<|action_end|>`.

Source: the chat format of internlm/internlm2_5-7b-chat (docs/chat_format.md of InternLM).
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix='<|action_start|><|plugin|>\n{"name": "$name", "parameters": ',
        suffix="}<|action_end|>",
        separator="\n",
        trigger="<|action_start|><|plugin|>",
        extra_begins=("<|action_start|>",),
        special_tokens=True,
    ),
    grammar=marked_json(("<|action_start|><|plugin|>",), ("<|action_end|>",)),
)
