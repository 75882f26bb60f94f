"""OLMo 3: Python calls, one on each line, between `<function_calls>` tags.

Source: the chat template of allenai/Olmo-3-7B-Instruct.
"""

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming
from tercet.frontend.parsers.tools.pythonic.python_calls import PythonMarks, python_calls

FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="<function_calls>",
        prefix="$name(",
        suffix=")",
        separator="\n",
        end="</function_calls>",
        style=Style.PYTHON,
        key_prefix="$key=",
        key_suffix="",
        key_separator=", ",
        trigger="<function_calls>",
    ),
    grammar=python_calls(PythonMarks(begin="<function_calls>", end="</function_calls>", lines=True)),
)
