"""What options say of a model's notations of tool calls and reasoning."""

from collections.abc import Iterable

from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

AUTOMATIC = "auto"
"""What the chat template uses."""
NONE = "none"
_OTHER_FIELDS = frozenset({"role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations"})
"""What chat messages have besides reasoning."""


def check_notations(*, tools: str, reasoning: str, reasoning_field: str) -> None:
    """Raise ValueError, naming the option, for a notation that there is not and a field that cannot hold reasoning."""
    _check("--tool-call-parser", tools, TOOL_FORMATS)
    _check("--reasoning-parser", reasoning, REASONING_FORMATS)
    if not reasoning_field.isidentifier() or reasoning_field in _OTHER_FIELDS:
        raise ValueError(f"--reasoning-field-name cannot be {reasoning_field!r}")


def _check(option: str, name: str, known: Iterable[str]) -> None:
    choices = (AUTOMATIC, NONE, *known)
    if name not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, not {name!r}")
