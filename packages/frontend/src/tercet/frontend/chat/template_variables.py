"""How a turn's wishes about reasoning are told to the model: by variables that its chat template reads."""

from collections.abc import Set
from typing import Any

from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.errors import UnsupportedParameterError

SWITCHES = ("enable_thinking", "thinking")
"""Variables that templates switch reasoning with."""
ALLOWED = frozenset({*SWITCHES, "reasoning_effort", "thinking_budget"})
"""What a request may set itself, as `chat_template_kwargs`."""


def template_variables(turn: ChatOptions, known: Set[str], *, reasons: bool) -> dict[str, Any]:
    """The variables, of those that the template knows. Raises BadRequestError for an effort it cannot be told of.

    A model that `reasons` and knows no such variable always does: it takes any effort, without effect, but not none.
    """
    thinking = turn.thinking
    variables: dict[str, Any] = {}
    if turn.reasoning_effort is not None:
        if thinking is None:
            thinking = turn.reasoning_effort != "none"
        if "reasoning_effort" in known:
            variables["reasoning_effort"] = turn.reasoning_effort
        elif known.isdisjoint(SWITCHES):
            if thinking and not reasons and turn.effort_needs_reasoning:
                raise UnsupportedParameterError(
                    "This model has no reasoning to set the effort of.", param=turn.param_names.reasoning_effort
                )
            if turn.reasoning_effort == "none" and reasons:
                raise UnsupportedParameterError(
                    "This model always reasons and cannot be told not to.", param=turn.param_names.reasoning_effort
                )
    if thinking is not None:
        variables |= {name: thinking for name in SWITCHES if name in known}
    return variables | turn.template_kwargs
