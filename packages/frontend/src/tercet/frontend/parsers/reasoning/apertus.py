"""Apertus: deliberation between `<|inner_prefix|>` and `<|inner_suffix|>`; calls end it, too.

Source: the chat template of swiss-ai/Apertus-8B-Instruct-2509.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(
    Tags(begin="<|inner_prefix|>", end="<|inner_suffix|>", extra_ends=("<|tools_prefix|>",), special_tokens=True)
)
