"""Template variables of a request, and the switch for reasoning that has many names.

One rule for every name: reasoning that is switched off is off. The template's own variable does it where the template
reads one; otherwise the answer has a budget of no reasoning tokens, which a grammar enforces.
"""

from collections.abc import Mapping, Set
from typing import Any

import msgspec

from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.errors import UnknownParameterError, UnsupportedParameterError
from tercet.frontend.model.chat_template import TEMPLATE_NAME, TemplateManager

SWITCHES = ("enable_thinking", "thinking")
"""Names of template variables that switch reasoning on and off."""
_EFFORT = "reasoning_effort"
_KNOWN = frozenset({*SWITCHES, _EFFORT, "thinking_budget", TEMPLATE_NAME})
"""Names in `chat_template_kwargs` that a request may have for every model. `TEMPLATE_NAME` names a template."""


def template_variables(turn: ChatOptions, read: Set[str], *, reasons: bool) -> dict[str, Any]:
    """Return values of the variables that the template reads. Raises BadRequestError for an unsupported effort.

    A model that `reasons` without such a variable takes any effort, without effect.
    """
    thinking, effort = _switch(turn), turn.reasoning_effort
    variables: dict[str, Any] = {name: thinking for name in SWITCHES if name in read and thinking is not None}
    if effort is not None and _EFFORT in read and not (effort == "none" and variables):
        variables[_EFFORT] = effort
    needs_reasoning = effort not in (None, "none") and turn.effort_needs_reasoning and thinking is not False
    if needs_reasoning and not reasons and read.isdisjoint({_EFFORT, *SWITCHES}):
        raise UnsupportedParameterError(
            "This model has no reasoning to set the effort of.", param=turn.options.param_names.reasoning_effort
        )
    return variables | {name: value for name, value in turn.template_kwargs.items() if name in {*read, TEMPLATE_NAME}}


def enforce_switch(turn: ChatOptions, template: TemplateManager | None, *, reasons: bool) -> ChatOptions:
    """Return the options with a budget of no reasoning if a model that reasons has no variable to switch it off."""
    if not reasons or turn.continue_final_message:
        return turn
    off = needs_no_reasoning(turn, template.variables if template is not None else frozenset())
    return msgspec.structs.replace(turn, thinking_budget=0) if off else turn


def check_names(kwargs: Mapping[str, Any], template: TemplateManager | None) -> None:
    """Refuse names in `chat_template_kwargs` that the template does not read. Raises UnknownParameterError."""
    read = template.variables if template is not None else frozenset[str]()
    for name in sorted(kwargs.keys() - _KNOWN - read):
        known = ", ".join(sorted(read)) or "none"
        raise UnknownParameterError(
            f"Unknown parameter: 'chat_template_kwargs.{name}'. The variables of this model's chat template: {known}.",
            param=f"chat_template_kwargs.{name}",
        )


def needs_no_reasoning(turn: ChatOptions, read: Set[str]) -> bool:
    """Return whether the request switches reasoning off and the template has no variable for it."""
    efforts = (turn.reasoning_effort, turn.template_kwargs.get(_EFFORT))
    named = {name: value for name, value in turn.template_kwargs.items() if name in SWITCHES}
    off = False in named.values() or (not named and "none" in efforts)
    return off and read.isdisjoint({_EFFORT, *SWITCHES})


def _switch(turn: ChatOptions) -> bool | None:
    """Return whether to reason; None leaves it to the model. A variable of the template is preferred."""
    for name in SWITCHES:
        value = turn.template_kwargs.get(name)
        if isinstance(value, bool):
            return value
    if turn.thinking is not None:
        return turn.thinking
    return turn.reasoning_effort != "none" if turn.reasoning_effort is not None else None
