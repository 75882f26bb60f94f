"""Tools in namespaces. Models have no namespaces, so each tool gets one flat name."""

from collections.abc import Mapping, Sequence
from typing import Any

_BETWEEN = "__"


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name of a tool as the model sees it."""
    return f"{namespace}{_BETWEEN}{name}" if namespace else name


def namespaces_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the namespace and name of each tool in a namespace, by its flat name.

    `tools` are those of a response body.
    """
    return {
        flat_name(tool["name"], each["name"]): (tool["name"], each["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for each in tool["tools"]
    }
