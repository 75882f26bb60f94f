"""Nemotron Nano 2 and Llama Nemotron Super 1.5: a JSON array between `<TOOLCALL>` tags.

Source: the chat templates of nvidia/NVIDIA-Nemotron-Nano-9B-v2 and nvidia/Llama-3_3-Nemotron-Super-49B-v1_5.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.json_calls.marked_json import marked_json

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<TOOLCALL>[",
        prefix='{"name": "$name", "arguments": ',
        suffix="}",
        separator=", ",
        end="]</TOOLCALL>",
        trigger="<TOOLCALL>",
    ),
    grammar=marked_json(("<TOOLCALL>",), ("</TOOLCALL>",)),
)
