"""Llama 3.2 and Llama 4: Python calls in a list, `[name(key=value), other()]`.

Source: the prompt formats of Llama 3.2 and Llama 4 in meta-llama/llama-models, whose list may stand between
`<|python_start|>` and `<|python_end|>`.
"""

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.pythonic.python_calls import PythonMarks, python_calls

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="[",
        prefix="$name(",
        suffix=")",
        separator=", ",
        end="]",
        style=Style.PYTHON,
        key_prefix="$key=",
        key_suffix="",
        key_separator=", ",
        trigger="[",
        extra_begins=("<|python_start|>",),
        extra_patterns=(r"\[\s*[A-Za-z0-9_.\-]+\s*\(",),
        special_tokens=True,
    ),
    grammar=python_calls(PythonMarks(begin="<|python_start|>", end="<|python_end|>", bare=True)),
)
