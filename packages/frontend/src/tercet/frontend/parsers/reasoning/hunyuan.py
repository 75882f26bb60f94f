"""Hunyuan: `<think>` tags, then the answer in `<answer>` tags.

Source: the chat template of tencent/Hunyuan-A13B-Instruct.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(Tags(begin="<think>", end="</think>", answer=("<answer>", "</answer>")))
