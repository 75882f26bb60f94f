"""Every instruction set that was built and that this processor runs, so that each is tested wherever it can be."""

import pytest

from packages.kernels.tests.quick_interpreter import quicken
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import LEVELS, Library, load_library
from tercet.kernels.native.ops import NativeOps

quicken()


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest) -> Library:
    try:
        return load_library(request.param)
    except UnavailableBackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def native(library: Library) -> NativeOps:
    return NativeOps(library)
