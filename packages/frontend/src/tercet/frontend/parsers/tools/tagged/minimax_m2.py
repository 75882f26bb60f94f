"""MiniMax-M2: `<invoke name="...">` elements between `<minimax:tool_call>` tags.

Source: the chat template of MiniMaxAI/MiniMax-M2.
"""

from tercet.frontend.parsers.tools.tagged.invoke import InvokeTags, invoke_format

FORMAT = invoke_format(InvokeTags(begin="<minimax:tool_call>", end="</minimax:tool_call>"))
