"""Requests made at random out of the server's own description: none is answered with a fault of the server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tercet.frontend.operations import OPERATIONS
from tests.server_process import Server

EXAMPLES = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
MORE = settings(EXAMPLES, max_examples=300)


@pytest.fixture(scope="module")
def fuzzed(start: Callable[..., Server]) -> Iterator[Server]:
    """A server of its own, that is as it was when all is over."""
    server = start("embedded", "--kv-cache-bytes", "64MiB").wait()
    yield server
    assert server.get("/health") == {"status": "ok"}
    server.wait_for(lambda load: load["running"] == load["queued"] == 0, limit=60)
    assert server.stop() == 0


@pytest.mark.parametrize(
    "extent", [pytest.param(EXAMPLES, id="short"), pytest.param(MORE, id="full", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_a_fault_of_the_server(fuzzed: Server, method: str, path: str, extent: settings) -> None:
    description = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    plain = path.replace(":path}", "}")

    @extent
    @given(case=description[plain][method].as_strategy())
    def check(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "embedded"  # a name at random would end every request at once
        answer = case.call(timeout=60)
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    check()
