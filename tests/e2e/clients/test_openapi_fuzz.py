"""Random requests generated from the server's own OpenAPI document: none gets a 5xx."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tercet.frontend.api.docs.operations import OPERATIONS
from tests.e2e.conftest import KEYS
from tests.server_process import Server

EXAMPLES = settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
MORE = settings(EXAMPLES, max_examples=300)


SCORES = {"/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"}
ENCODERS = {"/v1/embeddings", "/v1/classify", "/classify", *SCORES}
TRAINERS = {"/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed"}
"""Routes that wait for processes at the given address."""
UNDONE = {
    "/pause_generation": "/continue_generation",
    "/release_memory_occupation": "/resume_memory_occupation",
    "/start_profile": "/stop_profile",
}
"""Routes whose effect is ended by another."""
FEW_EVENTS = schemathesis.Config.from_dict({"max-stream-events": 2})
"""Without a limit of its own, schemathesis reads twenty events of /status/stream, which never ends."""


@pytest.fixture(scope="module")
def administered(start: Callable[..., Server]) -> Iterator[Server]:
    """Yield a separate server with an administrator's key."""
    server = start("embedded", "--kv-cache-bytes", "64MiB", env=KEYS, key="admin").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture(scope="module", params=["administered", "embedder"])
def fuzzed(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Yield each server, which must be unchanged at the end."""
    server = request.getfixturevalue(request.param)
    yield server
    httpx2.post(f"{server.url}/continue_generation", headers={"authorization": "Bearer admin"}).raise_for_status()
    assert server.get("/health") == {"status": "ok"}
    server.wait_for(lambda load: load["running"] == load["queued"] == 0, limit=60)


@pytest.fixture(scope="module")
def description(fuzzed: Server) -> schemathesis.schemas.BaseSchema:
    """Return the server's OpenAPI document, which takes a while to read."""
    url, headers = f"{fuzzed.url}/openapi.json", {"authorization": f"Bearer {fuzzed.key}"}
    return schemathesis.openapi.from_url(url, config=FEW_EVENTS, headers=headers)


@pytest.mark.parametrize(
    "extent", [pytest.param(EXAMPLES, id="short"), pytest.param(MORE, id="full", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_a_fault_of_the_server(
    fuzzed: Server, description: schemathesis.schemas.BaseSchema, method: str, path: str, extent: settings
) -> None:
    model, authorized = fuzzed.model(), {"authorization": f"Bearer {fuzzed.key}"}
    if (model == "embedded") == (path in ENCODERS):
        pytest.skip("the other server's to answer")
    if path in TRAINERS:
        pytest.skip("random addresses are waited for")
    plain = path.replace(":path}", "}")

    @extent
    @given(case=description[plain][method].as_strategy())
    def check(case: schemathesis.Case[Any]) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = model  # a random name would end every request at once
        answer = case.call(timeout=60, headers=authorized)
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    check()
    if path in UNDONE:
        httpx2.post(f"{fuzzed.url}{UNDONE[path]}", headers=authorized, json={})
