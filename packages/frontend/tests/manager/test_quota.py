"""Quota and isolation of API keys."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig, StoreConfig
from tercet.frontend.errors import RateLimitError
from tercet.frontend.http.auth import Caller, set_caller, set_resumed_caller
from tercet.frontend.manager.quota import ApiKeyQuota
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.messages import Rejected

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

MINE, YOURS = {"authorization": "Bearer mine"}, {"authorization": "Bearer yours"}
BOSS = {"authorization": "Bearer boss"}
TWO = HttpConfig(api_key=("mine", "yours"), admin_key=("boss",))
ONE_AT_A_TIME = HttpConfig(api_key=("mine", "yours"), admin_key=("boss",), max_requests_per_key=1)
ASK: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def three(request: object, index: int) -> list[Token]:
    return [Token(5, "x")] * 3


async def until_running(engine: FakeEngine, count: int) -> None:
    async with asyncio.timeout(10):
        while len(engine.running) < count:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def in_flight(served: Served, http: httpx2.AsyncClient, headers: dict[str, str]) -> AsyncIterator[None]:
    """Hold a request at the engine, then finish it."""
    before = len(served.engine.running)
    asked = asyncio.create_task(http.post("/v1/completions", json=ASK, headers=headers))
    await until_running(served.engine, before + 1)
    yield
    while not asked.done():
        served.engine.step()
        await asyncio.sleep(0.002)
    assert (await asked).status_code == 200


async def test_rule_15_more_than_a_key_may_have_at_once_is_a_429(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(three, auto=False), ONE_AT_A_TIME) as served:
        http = http_of(served)
        async with in_flight(served, http, MINE):
            refused = await http.post("/v1/chat/completions", json=CHAT, headers=MINE)
            worded = await http.post("/v1/messages", json=CHAT, headers=MINE)
            async with in_flight(served, http, YOURS), in_flight(served, http, BOSS), in_flight(served, http, BOSS):
                counted = (await http.get("/metrics", headers=MINE)).text
    assert (refused.status_code, worded.status_code) == (429, 429)
    assert refused.headers["retry-after"] == worded.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert worded.json()["type"] == "error"
    assert worded.json()["error"]["type"] == "rate_limit_error"
    assert "mine" not in refused.text
    assert '\ntercet_requests_over_limit_total{frontend="frontend-0"} 2.0\n' in counted


async def finishes(served: Served, http: httpx2.AsyncClient) -> None:
    served.engine.auto = True
    assert (await http.post("/v1/completions", json=ASK, headers=MINE)).status_code == 200


async def finishes_streaming(served: Served, http: httpx2.AsyncClient) -> None:
    served.engine.auto = True
    answer = await http.post("/v1/completions", json=ASK | {"stream": True}, headers=MINE)
    assert answer.text.endswith("data: [DONE]\n\n")


async def disconnects(served: Served, http: httpx2.AsyncClient) -> None:
    """Disconnect before the first token."""
    asked = asyncio.create_task(http.post("/v1/completions", json=ASK, headers=MINE))
    await until_running(served.engine, 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


async def disconnects_streaming(served: Served, http: httpx2.AsyncClient) -> None:
    asked = asyncio.create_task(
        http.send(http.build_request("POST", "/v1/completions", json=ASK | {"stream": True}, headers=MINE), stream=True)
    )
    await until_running(served.engine, 1)
    served.engine.step()
    await (await asked).aclose()


async def is_too_long(served: Served, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=ASK | {"max_tokens": 5000}, headers=MINE)
    assert answer.status_code == 400


async def has_unknown_model(served: Served, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/embeddings", json={"model": "tiny", "input": "hello"}, headers=MINE)
    assert answer.status_code == 400


async def is_rejected(served: Served, http: httpx2.AsyncClient) -> None:
    served.engine.reject = lambda request: Rejected(
        rid=request.rid, attempt=request.attempt, code="invalid", message="no", retry=False
    )
    assert (await http.post("/v1/completions", json=ASK, headers=MINE)).status_code == 400


async def has_no_scheduler(served: Served, http: httpx2.AsyncClient) -> None:
    served.engine.full.add("scheduler-0")
    assert (await http.post("/v1/completions", json=ASK, headers=MINE)).status_code == 503
    served.engine.full.clear()


async def is_aborted(served: Served, http: httpx2.AsyncClient) -> None:
    asked = asyncio.create_task(http.post("/v1/completions", json=ASK, headers=MINE))
    await until_running(served.engine, 1)
    await http.post("/abort_request", json={"abort_all": True}, headers=BOSS)
    assert (await asked).status_code == 499


@pytest.mark.parametrize(
    "end",
    [
        *(finishes, finishes_streaming, disconnects, disconnects_streaming, is_too_long),
        *(has_unknown_model, is_rejected, has_no_scheduler, is_aborted),
    ],
)
async def test_however_a_request_ends_its_place_is_free(
    engine_of: EngineOf, http_of: HttpOf, end: Callable[[Served, httpx2.AsyncClient], Any]
) -> None:
    async with serving(engine_of(three, auto=False), ONE_AT_A_TIME, max_waiting=0) as served:
        http = http_of(served)
        await end(served, http)
        await served.until_idle()
        assert served.manager.counters.over_limit == 0
        served.engine.reject, served.engine.auto = (lambda _request: None), False
        async with in_flight(served, http, MINE):
            assert (await http.post("/v1/completions", json=ASK, headers=MINE)).status_code == 429


async def test_work_in_the_background_is_in_flight_until_it_is_done(
    engine_of: EngineOf, http_of: HttpOf, tmp_path: Path
) -> None:
    store = StoreConfig(response_store=str(tmp_path / "responses.sqlite"))
    ask = {"model": "tiny", "input": "hello", "background": True, "max_output_tokens": 16}
    async with serving(engine_of(three, auto=False), ONE_AT_A_TIME, store=store) as served:
        http = http_of(served)
        assert (await http.post("/v1/responses", json=ask, headers=MINE)).status_code == 200
        await until_running(served.engine, 1)
        assert (await http.post("/v1/responses", json=ask, headers=MINE)).status_code == 429
        async with asyncio.timeout(10):
            while served.manager.running:
                served.engine.step()
                await asyncio.sleep(0.002)
        assert (await http.post("/v1/responses", json=ask, headers=MINE)).status_code == 200


def test_a_limit_without_keys_to_count_by_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-requests-per-key"):
        ApiKeyQuota.of(HttpConfig(max_requests_per_key=1))


async def salts(served: Served, http: httpx2.AsyncClient, *asked: tuple[dict[str, str], str | None]) -> list[str]:
    """Return the cache salts at the scheduler for these keys and client salts."""
    for headers, own in asked:
        answer = await http.post("/v1/completions", json=ASK | ({"cache_salt": own} if own else {}), headers=headers)
        assert answer.status_code == 200
    return [each.cache_salt for each in served.engine.requests()[-len(asked) :]]


async def test_each_key_has_a_prefix_cache_of_its_own(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(three), TWO) as served:
        http = http_of(served)
        asked = [(headers, own) for headers in (MINE, YOURS, BOSS) for own in (None, "salt")]
        found = await salts(served, http, *asked)
        assert len(set(found)) == len(asked)
        assert await salts(served, http, *asked) == found
        [forged] = await salts(served, http, (YOURS, found[0]))
        assert forged not in found
        for path, body in (("/v1/chat/completions", CHAT), ("/generate", {"text": "hello"}), ("/v1/messages", CHAT)):
            assert (await http.post(path, json=body, headers=MINE)).status_code == 200
            assert served.engine.requests()[-1].cache_salt == found[0], path
    async with serving(engine_of(three), TWO, peer="frontend-1") as served:
        assert await salts(served, http_of(served), *asked) == found, "another frontend would share nothing with this"
    for key in ("mine", "yours", "boss"):
        digest = hashlib.sha256(key.encode()).hexdigest()
        assert not [salt for salt in found if key in salt or digest in salt]


@pytest.mark.parametrize(
    "config",
    [
        HttpConfig(),
        HttpConfig(api_key=("mine",), admin_key=("boss",)),
        HttpConfig(api_key=("mine", "mine")),
        HttpConfig(api_key=("mine", "yours"), share_cache_between_keys=True),
    ],
)
async def test_a_single_tenant_s_cache_is_one(engine_of: EngineOf, http_of: HttpOf, config: HttpConfig) -> None:
    async with serving(engine_of(three), config) as served:
        assert await salts(served, http_of(served), (MINE, None), (MINE, "salt")) == ["", "salt"]


async def tenants(served: Served, http: httpx2.AsyncClient, *keys: dict[str, str]) -> list[str]:
    """Return the tenant ids at the scheduler for these keys."""
    await salts(served, http, *((headers, None) for headers in keys))
    return [each.tenant for each in served.engine.requests()[-len(keys) :]]


@pytest.mark.parametrize("shared", [False, True])
async def test_schedulers_are_told_whose_a_request_is(engine_of: EngineOf, http_of: HttpOf, *, shared: bool) -> None:
    """The id is the same from every frontend and route, and does not contain the key."""
    config = HttpConfig(api_key=("mine", "yours"), admin_key=("boss",), share_cache_between_keys=shared)
    async with serving(engine_of(three), config) as served:
        http = http_of(served)
        found = await tenants(served, http, MINE, YOURS, BOSS)
        assert len({*found, ""}) == 4
        for path, body in (("/v1/chat/completions", CHAT), ("/generate", {"text": "hello"}), ("/v1/messages", CHAT)):
            assert (await http.post(path, json=body, headers=MINE)).status_code == 200, path
            assert served.engine.requests()[-1].tenant == found[0], path
    async with serving(engine_of(three), HttpConfig(api_key=("mine",)), peer="frontend-1") as served:
        assert await tenants(served, http_of(served), MINE) == found[:1]
    for key in ("mine", "yours", "boss"):
        digest = hashlib.sha256(key.encode()).hexdigest()
        assert not [name for name in found if key in name or name in digest or digest in name]


async def test_where_nobody_needs_a_key_all_are_one_tenant(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(three), HttpConfig()) as served:
        assert await tenants(served, http_of(served), MINE, YOURS, {}) == ["", "", ""]


async def test_a_request_is_sent_again_with_the_salt_it_had(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(three, auto=False, schedulers=["scheduler-0", "scheduler-1"])
    async with serving(engine, TWO) as served:
        asked = asyncio.create_task(http_of(served).post("/v1/completions", json=ASK, headers=MINE))
        await until_running(engine, 1)
        engine.down(engine.running[0].scheduler)
        await until_running(engine, 1)
        engine.auto = True
        engine._schedule()
        assert (await asked).status_code == 200
        first, again = engine.requests()
    assert again.attempt == 1
    assert first.cache_salt == again.cache_salt != ""
    assert first.tenant == again.tenant != ""


async def test_a_session_and_a_response_go_on_in_their_key_s_cache(
    engine_of: EngineOf, http_of: HttpOf, tmp_path: Path
) -> None:
    store = StoreConfig(response_store=str(tmp_path / "responses.sqlite"))
    async with serving(engine_of(three), TWO, store=store) as served:
        http = http_of(served)
        [mine] = await salts(served, http, (MINE, None))
        session = (await http.post("/open_session", json={"capacity_of_str_len": 99}, headers=MINE)).json()
        first = (await http.post("/generate", json=turn(session, None), headers=MINE)).json()
        rid = first["meta_info"]["id"]
        assert (await http.post("/generate", json=turn(session, rid), headers=MINE)).status_code == 200
        response = await http.post("/v1/responses", json={"model": "tiny", "input": "hello"}, headers=MINE)
        then = {"model": "tiny", "input": "on", "previous_response_id": response.json()["id"]}
        assert (await http.post("/v1/responses", json=then, headers=MINE)).status_code == 200
        assert [each.cache_salt for each in served.engine.requests()] == [mine] * 5


def turn(session: str, before: str | None) -> dict[str, Any]:
    params = {"id": session} | ({"rid": before} if before else {})
    return {"text": "hello", "session_params": params, "sampling_params": {"max_new_tokens": 3}}


async def test_a_response_taken_over_keeps_its_salt(engine_of: EngineOf, http_of: HttpOf, tmp_path: Path) -> None:
    store = StoreConfig(response_store=str(tmp_path / "responses.sqlite"))
    ask = {"model": "tiny", "input": "hello", "background": True}
    async with serving(engine_of(three, auto=False), ONE_AT_A_TIME, store=store) as served:
        assert (await http_of(served).post("/v1/responses", json=ask, headers=MINE)).status_code == 200
        await until_running(served.engine, 1)
    [asked] = served.engine.requests()
    async with serving(engine_of(three, auto=False), ONE_AT_A_TIME, store=store, peer="frontend-1") as served:
        await until_running(served.engine, 1)
    [again] = served.engine.requests()
    assert again.input_ids == asked.input_ids
    assert again.cache_salt == asked.cache_salt != ""
    assert again.tenant == asked.tenant != ""


def test_what_is_taken_over_is_counted_and_never_refused() -> None:
    tenants = ApiKeyQuota(max_answers=1)
    set_resumed_caller("owner")
    places = [tenants.acquire(), tenants.acquire()]
    set_caller({}, Caller("owner"))
    for place in places:
        with pytest.raises(RateLimitError):
            tenants.acquire()
        place.release()
        place.release()
    tenants.acquire()


FOUR_AT_A_TIME = HttpConfig(api_key=("mine", "yours"), max_requests_per_key=4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["hello"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": ["hello"] * 3, "n": 2}, "n"),
        ("/v1/completions", {"prompt": "hello", "best_of": 5}, "best_of"),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "n": 5}, "n"),
        ("/generate", {"text": ["hello"] * 5}, "text"),
    ],
)
async def test_more_answers_than_a_key_may_ever_have_are_a_400(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of(three), FOUR_AT_A_TIME) as served:
        answer = await http_of(served).post(path, json={"model": "tiny", **body}, headers=MINE)
        assert not served.engine.requests()
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "and an API key may have 4 in flight" in error["message"]


async def test_a_key_s_limit_counts_prompts_and_choices(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(three, auto=False), FOUR_AT_A_TIME) as served:
        http = http_of(served)
        asked = asyncio.create_task(http.post("/v1/completions", json=ASK | {"prompt": ["a", "b", "c"]}, headers=MINE))
        await until_running(served.engine, 3)
        refused = await http.post("/v1/chat/completions", json=CHAT | {"n": 2}, headers=MINE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "has 3 answers in flight, and the request asks for 2 more" in refused.text
        async with in_flight(served, http, MINE):
            assert (await http.post("/v1/completions", json=ASK, headers=MINE)).status_code == 429
        assert (await asked).status_code == 200
        async with in_flight(served, http, MINE):
            pass
