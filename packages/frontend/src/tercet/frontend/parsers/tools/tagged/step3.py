"""Step 3: `<steptml:invoke name="...">` elements, each between markers, in a section.

Source: the chat template of stepfun-ai/step3.
"""

from tercet.frontend.parsers.tools.tagged.invoke import InvokeTags, invoke_format

FORMAT = invoke_format(
    InvokeTags(
        begin="<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        prefix="steptml:",
        before="<｜tool_call_begin｜>function<｜tool_sep｜>",
        behind="<｜tool_call_end｜>",
        special_tokens=True,
    )
)
