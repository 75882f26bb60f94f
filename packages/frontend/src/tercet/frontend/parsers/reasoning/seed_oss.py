"""Seed-OSS: `<seed:think>` and `</seed:think>`, which the model writes itself.

Source: the chat template of ByteDance-Seed/Seed-OSS-36B-Instruct. With `thinking_budget` 0 the prompt opens the
reasoning and a reflection on the budget in it.
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(Tags(begin="<seed:think>", end="</seed:think>", opened_by=("<seed:think><seed:cot_budget_reflect>",)))
