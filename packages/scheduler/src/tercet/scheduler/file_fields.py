"""Classes of fields in a model's JSON files: honored, without effect, or refused unless they have a supported value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.scheduler.model_files import ModelError

_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Only:
    """Reason why a field is refused, and the values that are supported besides those of `is_unset`."""

    why: str
    values: tuple[Any, ...] = ()
    empty_is_set: bool = False
    """An empty list or object counts as set, because the reference takes it for a request with all defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFields:
    """The fields that the reference reads of one kind of object, each in exactly one class."""

    honoured: frozenset[str]
    """Fields that are computed as the reference does, or whose value the reader refuses itself."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Fields without effect, each with the reason why no value of it changes an answer here."""
    refused: Mapping[str, Only] = field(default_factory=dict)
    """Fields of which `check` refuses any other value."""

    def __post_init__(self) -> None:
        """Raise ValueError for a field in two classes."""
        names = [*self.honoured, *self.no_effect, *self.refused]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"fields in two classes: {', '.join(sorted(twice))}")

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all fields."""
        return self.honoured | self.no_effect.keys() | self.refused.keys()

    def check(self, values: Mapping[str, Any], where: str, *, unknown: bool = True) -> None:
        """Raise ModelError, in one line, for a field whose value is not supported.

        A field in no class is refused, too, unless it is unset; `unknown` allows any.
        """
        for name, value in values.items():
            only = self.refused.get(name)
            if is_unset(value) and not (only is not None and only.empty_is_set and value in ([], {})):
                continue
            if only is not None and not _is_one_of(value, only.values):
                raise unsupported(f"{where}{name}", value, only.why)
            if not unknown and name not in self.names:
                raise unsupported(f"{where}{name}", value, "the field is unknown here and may change answers")


def is_unset(value: object) -> bool:
    """Return whether a value asks for nothing: null, false, or an empty string, list or object."""
    return value is None or value is False or value in ("", [], {})


def unsupported(name: str, value: object, why: str) -> ModelError:
    """Return the error for a field with a value that is not supported."""
    text = repr(value)
    shown = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
    return ModelError(f"{name}: {shown} is not supported: {why}")


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    if isinstance(value, str):
        value = value.lower()
    return any(type(value) is type(one) and value == one for one in allowed)
