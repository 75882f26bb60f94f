"""DeepSeek V3.2 and V4: DSML, `<｜DSML｜invoke name="...">` elements in a section.

Source: encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2, and encoding/encoding_dsv4.py of
deepseek-ai/DeepSeek-V4-Pro, whose section has another name.
"""

from tercet.frontend.parsers.tools.tagged.invoke import InvokeTags, invoke_format

_DSML = "｜DSML｜"

FORMAT = invoke_format(
    InvokeTags(begin=f"<{_DSML}function_calls>", end=f"</{_DSML}function_calls>", prefix=_DSML, typed=True)
)
V4_FORMAT = invoke_format(
    InvokeTags(begin=f"<{_DSML}tool_calls>", end=f"</{_DSML}tool_calls>", prefix=_DSML, typed=True)
)
