"""The JSON files among those of a model."""

import json
from collections.abc import Mapping
from typing import Any


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a file; an empty one where there is no such file. Raises ValueError, naming the file."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object")
    return value
