"""pytest plugin with the clients that Anthropic's tests ask for; their own fixtures need a recorder of snapshots."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from anthropic import Anthropic, AsyncAnthropic

from absent_modules import stand_in  # type: ignore[import-not-found]

stand_in("inline_snapshot")
ADDRESS = {"base_url": os.environ["TERCET_URL"], "api_key": "my-anthropic-api-key"}


def strict(request: pytest.FixtureRequest) -> bool:
    """Return whether answers are validated strictly: the parameter, or a field of it."""
    param = getattr(request, "param", True)
    return bool(param.get("strict", True) if isinstance(param, dict) else param)


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[Anthropic]:
    with Anthropic(_strict_response_validation=strict(request), max_retries=0, **ADDRESS) as made:  # type: ignore[arg-type]
        yield made


@pytest_asyncio.fixture
async def async_client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(_strict_response_validation=strict(request), max_retries=0, **ADDRESS) as made:  # type: ignore[arg-type]
        yield made
