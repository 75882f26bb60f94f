"""Typed reads of a config.json, with one line for whatever is wrong in it."""

import math
from collections.abc import Mapping
from typing import Any

from tercet.scheduler.model_files import ModelError

_LARGEST = 2**31 - 1
_MISSING: Any = object()
MOST_LAYERS = 10_000


class Fields:
    """Typed reads of a JSON object; null counts as absent, and an absent field without a default is an error."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def count(self, name: str, default: int = _MISSING, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self._wrong(name, f"{value!r} is not a positive integer")
        return value

    def layers(self) -> int:
        """How many layers there are: few enough for something to be kept of each."""
        layers = self.count("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self._wrong("num_hidden_layers", f"{layers} are more than {MOST_LAYERS}")
        return layers

    def number(self, name: str, default: float = _MISSING) -> float:
        """A positive, finite number."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, f"{value!r} is not a positive number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive, finite numbers."""
        value = self._get(name, _MISSING)
        if not isinstance(value, list) or not all(type(one) in (int, float) and 0 < one < math.inf for one in value):
            raise self._wrong(name, "is not a list of positive numbers")
        return tuple(map(float, value))

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, f"{value!r} is neither true nor false")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is _MISSING:
            raise self._wrong(name, "is missing")
        return value

    def _wrong(self, name: str, why: str) -> ModelError:
        return wrong(self.where + name, why)


def wrong(name: str, why: str) -> ModelError:
    """The error for a field."""
    return ModelError(f"config.json: {name}: {why}")
