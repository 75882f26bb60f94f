"""Command R7B, Command A and later: reasoning and answer between markers.

Source: the chat template for tools of CohereForAI/c4ai-command-r7b-12-2024.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(
    Tags(
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        extra_ends=("<|START_ACTION|>",),
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        special_tokens=True,
    )
)
