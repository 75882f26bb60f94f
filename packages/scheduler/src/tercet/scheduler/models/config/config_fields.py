"""Typed reads of a config.json, with errors of one line."""

from collections.abc import Mapping, Sequence
from typing import Any

from tercet.scheduler.model_files import ModelError

LARGEST = 2**31 - 1
"""Maximum of any count, because kernels and tables number elements in 32 bits."""
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e15
"""Range of any other number: well within float32, and beyond all real models."""
_MISSING: Any = object()
MOST_LAYERS = 10_000
_LONGEST_VALUE = 100


class Fields:
    """Typed reads of a JSON object; null counts as absent, and an absent field without a default is an error."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def count(self, name: str, default: int = _MISSING, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= LARGEST:
            raise self._wrong(name, f"{_short(value)} is not a positive integer of at most {LARGEST}")
        return value

    def layers(self) -> int:
        """Return the number of layers, limited so that tables per layer stay small."""
        layers = self.count("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self._wrong("num_hidden_layers", f"{layers} are more than {MOST_LAYERS}")
        return layers

    def number(self, name: str, default: float = _MISSING, *, zero: bool = False) -> float:
        """Return a positive number in float32's range, or 0 if `zero`."""
        value = self._get(name, default)
        if not _is_number(value) and not (zero and type(value) in (int, float) and value == 0):
            raise self._wrong(name, f"{_short(value)} is not a positive number from {LEAST_NUMBER} to {MOST_NUMBER}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of positive numbers in float32's range."""
        value = self._get(name, _MISSING)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self._wrong(name, "is not a list of positive numbers")
        return tuple(map(float, value))

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self.values.get(name) is not None

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean. Null is an error if the default is true, because transformers takes null for false."""
        if default and name in self.values and self.values[name] is None:
            raise self._wrong(name, "null is neither true nor false")
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, f"{_short(value)} is neither true nor false")
        return value

    def choice(self, name: str, known: Sequence[str], default: str) -> str:
        """Return one of the known words."""
        value = self._get(name, default)
        if value not in known:
            raise self._wrong(name, f"{value!r} is not supported, only {', '.join(known)}")
        return str(value)

    def kinds(self, name: str, known: Sequence[str], layers: int) -> list[str]:
        """Return one of the known words for each layer."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != layers or any(kind not in known for kind in value):
            raise self._wrong(name, f"must say {' or '.join(known)} for each of the {layers} layers")
        return value

    def layer_list(self, name: str) -> list[int] | None:
        """Return a list of layers' numbers, or None if it is absent."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, list) or any(type(layer) is not int for layer in value)):
            raise self._wrong(name, f"{_short(value)} is not a list of layers")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is _MISSING:
            raise self._wrong(name, "is missing")
        return value

    def _wrong(self, name: str, why: str) -> ModelError:
        return wrong(self.where + name, why)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and LEAST_NUMBER <= value <= MOST_NUMBER  # type: ignore[operator]


def _short(value: object) -> str:
    """Return a value as a short line."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def wrong(name: str, why: str) -> ModelError:
    """Return the error for a field."""
    return ModelError(f"config.json: {name}: {why}")
