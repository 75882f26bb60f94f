"""Stand-ins for a peer's modules, so that its tests run where it is not installed.

Folders of tests are found without running the `__init__` above them. Every other module of the peer is a stand-in: each
name in it is a class without content. Tests that use one are skipped.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NoReturn

import pytest


class _Skipping(type):
    """Metaclass of classes that skip the test that uses them."""

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        pytest.skip("needs a module of the peer that is not installed")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.skip("needs a module of the peer that is not installed")


class Absent(metaclass=_Skipping):
    """Stand-in for any class or function of the peer."""


class _AbsentModule(ModuleType):
    """Module in which every name is `Absent`."""

    def __getattr__(self, name: str) -> type[Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of stand-ins below a package. `real` are folders whose modules are the peer's own, by package name."""

    def __init__(self, package: str, real: Mapping[str, Path]) -> None:
        self._package = package
        self._real = real

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a stand-in, or None for a module of a real folder."""
        if fullname.partition(".")[0] != self._package or fullname.rpartition(".")[0] in self._real:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Let the modules of a real folder be found."""
        module.__path__ = [str(self._real[module.__name__])] if module.__name__ in self._real else []


def stand_in(package: str, real: Mapping[str, Path] = MappingProxyType({})) -> None:
    """Use stand-ins for a package from here on."""
    sys.meta_path.insert(0, StandInFinder(package, real))
