"""Typed access to the metadata of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tercet.scheduler.gguf.gguf_paths import GGUFError

_LARGEST = 1 << 40


@dataclass(frozen=True)
class GGUFFields:
    """The fields of one architecture: `llama.block_count` is `block_count` here."""

    metadata: Mapping[str, Any]
    architecture: str

    def get(self, name: str) -> Any:
        """Return a field's value, None if it is not there."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def has(self, name: str) -> bool:
        """Return whether a field is there."""
        return self.get(name) is not None

    def count(self, name: str, default: int | None = None) -> int:
        """Return a positive or zero integer. A list of equal ones for all layers stands for one."""
        value = self._single(name)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; those stored in float32 are rounded to the shortest decimal."""
        value = self._single(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise self._wrong(name, value)
        return float(f"{value:.7g}")

    def text(self, name: str, default: str = "") -> str:
        """Return a text."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._wrong(name, value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(name, value)
        return value

    def _single(self, name: str) -> Any:
        value = self.get(name)
        if isinstance(value, list):
            if len({*map(str, value)}) != 1:
                raise GGUFError(f"{self.architecture}.{name}: layers that differ are not supported")
            return value[0]
        return value

    def _wrong(self, name: str, value: object) -> GGUFError:
        if value is None:
            return GGUFError(f"{self.architecture}.{name} is missing")
        return GGUFError(f"{self.architecture}.{name}: {str(value)[:40]!r} is not supported")
