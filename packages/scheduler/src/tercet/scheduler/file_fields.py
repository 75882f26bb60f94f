"""The fields of a model's JSON files: honoured, without effect, or refused unless they keep a value supported here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.scheduler.model_files import ModelError

_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Only:
    """Why a field is refused, and the values that are supported besides those of `is_unset`."""

    why: str
    values: tuple[Any, ...] = ()
    empty_is_set: bool = False
    """Whether the reference takes an empty list or object for a request, of all its defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFields:
    """The fields that the reference reads of one kind of object, each in exactly one class."""

    honoured: frozenset[str]
    """The reader computes what the reference does, or refuses the value itself."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Each field with the reason why no value of it changes an answer here."""
    refused: Mapping[str, Only] = field(default_factory=dict)
    """`check` refuses any other value of these."""

    def __post_init__(self) -> None:
        """Raise ValueError for a field in two classes."""
        names = [*self.honoured, *self.no_effect, *self.refused]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"fields in two classes: {', '.join(sorted(twice))}")

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.honoured | self.no_effect.keys() | self.refused.keys()

    def check(self, values: Mapping[str, Any], where: str, *, unknown: bool = True) -> None:
        """Raise ModelError, in one line, for a field whose value is not supported.

        A field in no class is refused too unless it is unset; `unknown` allows any.
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
