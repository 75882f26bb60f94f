"""Shared fixtures; random tests have no time limit.

The duration of one example depends more on the machine than on the code.
"""

from collections.abc import Iterator

import pytest

from tercet.protocol.messages.values import Role
from tercet.protocol.testing import Network
from tercet.protocol.transport.keys import write_keys
from tercet.protocol.transport.security import Security


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Security]:
    """Return the keys of each role."""
    directory = tmp_path_factory.mktemp("keys")
    write_keys(directory)
    return {role: Security.load(directory / role.value, role) for role in Role}
