"""Functions and custom tools that stand in a namespace: a model has no namespaces, and knows each by one name."""

from collections.abc import Mapping, Sequence
from typing import Any

_BETWEEN = "__"


def known_as(namespace: str | None, name: str) -> str:
    """What the model calls a tool."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


def spaces_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each tool in one, by what the model calls it; `tools` are those of a response."""
    return {
        known_as(tool["name"], each["name"]): (tool["name"], each["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for each in tool["tools"]
    }
