"""Template variables that control reasoning."""

from collections.abc import Set
from typing import Any

from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.errors import UnsupportedParameterError

SWITCHES = ("enable_thinking", "thinking")
"""Names of template variables that switch reasoning on and off."""
ALLOWED = frozenset({*SWITCHES, "reasoning_effort", "thinking_budget", "chat_template"})
"""Variables that a request may set in `chat_template_kwargs`; `chat_template` names one of the model's templates."""


def template_variables(turn: ChatOptions, known: Set[str], *, reasons: bool) -> dict[str, Any]:
    """Return the variables that the template knows. Raises BadRequestError for an unsupported effort.

    A model that `reasons` without such a variable always reasons: any effort but "none" is accepted, without effect.
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
                    "This model has no reasoning to set the effort of.", param=turn.options.param_names.reasoning_effort
                )
            if turn.reasoning_effort == "none" and reasons:
                raise UnsupportedParameterError(
                    "This model always reasons and cannot be told not to.",
                    param=turn.options.param_names.reasoning_effort,
                )
    if thinking is not None:
        variables |= {name: thinking for name in SWITCHES if name in known}
    return variables | turn.template_kwargs
