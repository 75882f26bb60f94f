"""/v1/models through Anthropic's client, which validates strictly, and in OpenAI's format."""

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anthropic
import httpx2
import pytest

from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
HEADERS = {"anthropic-version": "2023-06-01"}


@pytest.fixture
async def three(engine_of: EngineOf) -> AsyncIterator[Served]:
    async with serving(engine_of(), names=("org/one", "two", "three")) as served:
        yield served


@pytest.fixture
async def client(three: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    async with anthropic.AsyncAnthropic(base_url=three.url, **options) as made:
        yield made


async def test_its_client_lists_models(client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list()
    assert [model.id for model in page.data] == ["org/one", "two", "three"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "org/one", "three")
    first = page.data[0]
    assert (first.type, first.display_name) == ("model", "org/one")
    assert timedelta() <= datetime.now(UTC) - first.created_at < timedelta(minutes=1)


async def test_its_client_goes_from_page_to_page_in_both_directions(client: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list(limit=1)] == ["org/one", "two", "three"]
    assert [model.id async for model in client.models.list(limit=1, before_id="three")] == ["two", "org/one"]
    assert (await client.models.list(after_id="three")).data == []


async def test_its_client_asks_for_one_model(client: anthropic.AsyncAnthropic, three: Served) -> None:
    assert (await client.models.retrieve("org/one")).id == "org/one"
    assert (await client.models.retrieve("two")).max_input_tokens == three.manager.models.get("two").context
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as unknown:
        await client.models.retrieve("four")
    error: Any = unknown.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert unknown.value.request_id == error["request_id"]


@pytest.mark.parametrize("query", ["limit=0", "limit=many", "limit=1001", "after_id=four", "before_id="])
async def test_pages_that_there_are_not_are_refused_by_name(three: Served, http_of: HttpOf, query: str) -> None:
    refused = await http_of(three).get(f"/v1/models?{query}", headers=HEADERS)
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.json()["error"]["message"].startswith(query.partition("=")[0] + ": ")


async def test_others_have_openais_shape(three: Served, http_of: HttpOf) -> None:
    listed = (await http_of(three).get("/v1/models?limit=0")).json()
    assert listed["object"] == "list"
    assert [card["object"] for card in listed["data"]] == ["model"] * 3
    assert (await http_of(three).get("/v1/models/two")).json() == listed["data"][1]
    assert (await http_of(three).get("/v1/models/four")).json()["error"]["code"] == "model_not_found"
