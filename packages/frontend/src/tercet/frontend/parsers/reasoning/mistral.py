"""Magistral and its successors: `[THINK]` and `[/THINK]`, which the model writes itself.

Source: the chat template of mistralai/Magistral-Small-2509 and mistral-common's v13 tokenizer.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(Tags(begin="[THINK]", end="[/THINK]", special_tokens=True))
