"""Every instruction set that this processor runs or that can be emulated, so that each is tested wherever it can be."""

import os

import pytest

from packages.kernels.tests.emulated import emulated_library
from packages.kernels.tests.quick_interpreter import quicken
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import LEVELS, Library, load_library
from tercet.kernels.native.ops import NativeOps

quicken()


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    try:
        return load_library(request.param)
    except UnavailableBackendError:
        own = tmp_path_factory.getbasetemp()
        shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    try:
        return emulated_library(request.param, shared / "emulated")
    except UnavailableBackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def native(library: Library) -> NativeOps:
    return NativeOps(library)
