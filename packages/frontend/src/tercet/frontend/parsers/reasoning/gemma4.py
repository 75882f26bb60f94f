"""Gemma 4: the channel `thought`, which the prompt opens and closes where reasoning is off.

Source: the chat template of google/gemma-4-31B-it.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(Tags(begin="<|channel>thought", end="<channel|>", special_tokens=True))
