"""What tests of ranks leave as it was: cores, threads, and the place of sockets."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tercet.kernels.native.library import load_library, missing_library


@pytest.fixture
def as_before() -> Iterator[None]:
    """Cores and threads of this process are those that it had."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    native = None if missing_library() else load_library().threads
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    if native is not None:
        load_library().set_threads(native)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories for sockets are made."""
    place = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a path short enough for sockets."""
    return tmp_path_factory.mktemp("r")
