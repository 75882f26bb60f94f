"""LFM2 and LFM2.5: Python calls in a list between `<|tool_call_start|>` and `<|tool_call_end|>`.

Source: the chat templates of LiquidAI/LFM2-1.2B-Tool and LiquidAI/LFM2.5-8B-A1B.
"""

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.pythonic.python_calls import PythonMarks, python_calls

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<|tool_call_start|>[",
        prefix="$name(",
        suffix=")",
        separator=", ",
        end="]<|tool_call_end|>",
        style=Style.PYTHON,
        key_prefix="$key=",
        key_suffix="",
        key_separator=", ",
        trigger="<|tool_call_start|>",
        special_tokens=True,
    ),
    grammar=python_calls(PythonMarks(begin="<|tool_call_start|>", end="<|tool_call_end|>")),
)
