"""Sessions: prompts that continue earlier ones, on any frontend."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from tercet.frontend.config.config import HttpConfig, StoreConfig
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits, unpack_ints

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

SAID = [10, 11, 12, 13]
"""Output of the engine for every prompt."""


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept.sqlite"))


async def opened(client: httpx2.AsyncClient, capacity: int = 1000, **fields: Any) -> str:
    answer = await client.post("/open_session", json={"capacity_of_str_len": capacity, **fields})
    assert answer.status_code == 200, answer.text
    session: str = answer.json()
    return session


async def turn(client: httpx2.AsyncClient, session: str, ids: list[int], **params: Any) -> str:
    """Send a turn and return its id."""
    body = {"input_ids": ids, "session_params": {"id": session, **params}}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    rid: str = answer.json()["meta_info"]["id"]
    return rid


def last_prompt(served: Served) -> list[int]:
    return list(unpack_ints(served.engine.requests()[-1].input_ids))


async def test_a_turn_goes_on_from_another_and_branches(
    engine_of: EngineOf, http_of: HttpOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = http_of(served)
        session = await opened(client)
        first = await turn(client, session, [1, 2])
        assert last_prompt(served) == [1, 2]
        second = await turn(client, session, [3], rid=first)
        assert last_prompt(served) == [1, 2, *SAID, 3]
        await turn(client, session, [4], rid=first)
        assert last_prompt(served) == [1, 2, *SAID, 4], "another branch of the same turn"
        await turn(client, session, [5], rid=second)
        assert last_prompt(served) == [1, 2, *SAID, 3, *SAID, 5]
        await turn(client, session, [6])
        assert last_prompt(served) == [6], "without a turn to go on from it begins anew"


async def test_what_is_taken_of_the_turn_before(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with serving(engine_of(), store=store) as served:
        client = http_of(served)
        session = await opened(client)
        first = await turn(client, session, [1, 2])
        for params, before in (
            ({"drop_previous_output": True}, [1, 2]),
            ({"offset": 3}, [1, 2, *SAID][:3]),
            ({"offset": 0}, [1, 2, *SAID]),
            ({"offset": -1}, [1, 2, *SAID][:-1]),
            ({"offset": -4}, [1, 2, *SAID][:-4]),
            ({"offset": -99}, []),
            ({"offset": 1, "drop_previous_output": True}, [1]),
        ):
            await turn(client, session, [7], rid=first, **params)
            assert last_prompt(served) == [*before, 7], params


async def test_replacing_forgets_what_went_on_before(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with serving(engine_of(), store=store) as served:
        client = http_of(served)
        session = await opened(client)
        first = await turn(client, session, [1])
        second = await turn(client, session, [2], rid=first)
        third = await turn(client, session, [3], rid=second)
        other = await turn(client, session, [4], rid=first, replace=True)
        for gone in (second, third):
            body = {"input_ids": [9], "session_params": {"id": session, "rid": gone}}
            refused = await client.post("/generate", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_params.rid")
        await turn(client, session, [5], rid=other)
        fresh = await turn(client, session, [6], replace=True)
        body = {"input_ids": [9], "session_params": {"id": session, "rid": first}}
        assert (await client.post("/generate", json=body)).status_code == 400
        await turn(client, session, [7], rid=fresh)


async def test_session_text_is_tokenized_alone_and_stored_before_the_stream_ends(
    engine_of: EngineOf, http_of: HttpOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = http_of(served)
        encode = served.manager.models.get("tiny").tokenizer.encode
        session = await opened(client)
        body = {"text": "hello", "stream": True, "session_params": {"id": session}}
        async with client.stream("POST", "/generate", json=body) as stream:
            async for line in stream.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                meta = json.loads(line.removeprefix("data: "))["meta_info"]
                if meta["finish_reason"] is not None:
                    await turn(client, session, [7], rid=meta["id"])
        assert last_prompt(served) == [*encode("hello", add_special_tokens=True), *SAID, 7]


async def test_any_frontend_serves_a_session(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with (
        serving(engine_of(), store=store) as one,
        serving(engine_of(), store=store, peer="frontend-1") as other,
    ):
        session = await opened(http_of(one), session_id="mine")
        assert session == "mine"
        first = await turn(http_of(one), session, [1])
        await turn(http_of(other), session, [2], rid=first)
        assert last_prompt(other) == [1, *SAID, 2]
        assert (await http_of(other).post("/close_session", json={"session_id": session})).status_code == 200
        body = {"input_ids": [9], "session_params": {"id": session, "rid": first}}
        assert (await http_of(one).post("/generate", json=body)).status_code == 404


async def test_a_session_belongs_to_its_key(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("mine", "yours")), store=store) as served:
        client = http_of(served)
        client.headers["authorization"] = "Bearer mine"
        session = await opened(client, session_id="same")
        first = await turn(client, session, [1])
        client.headers["authorization"] = "Bearer yours"
        body = {"input_ids": [9], "session_params": {"id": session, "rid": first}}
        assert (await client.post("/generate", json=body)).status_code == 404
        assert (await client.post("/close_session", json={"session_id": session})).status_code == 404
        assert await opened(client, session_id="same") == "same", "a name is taken for its owner only"
        assert (await client.post("/generate", json=body)).status_code == 400, "and has no such turn"


async def test_what_cannot_be_is_refused(
    engine_of: EngineOf, http_of: HttpOf, store: StoreConfig, limits: ModelLimits
) -> None:
    tight = msgspec.structs.replace(limits, context_length=8)
    async with serving(engine_of(limits=tight), store=store) as served:
        client = http_of(served)
        session = await opened(client, capacity=6, session_id="s")
        again = await client.post("/open_session", json={"capacity_of_str_len": 1, "session_id": "s"})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "session_id")
        params = {"id": session}
        several = {"input_ids": [1], "sampling_params": {"n": 2}, "session_params": params}
        assert (await client.post("/generate", json=several)).json()["error"]["param"] == "sampling_params.n"
        first = await turn(client, session, [1, 2])
        long = {"input_ids": [3], "session_params": {**params, "rid": first}}
        refused = await client.post("/generate", json=long)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_params.id")
        unknown = await client.post("/close_session", json={"session_id": "none"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "session_id")


async def test_a_turn_that_fails_is_no_turn(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with serving(engine_of(), store=store) as served:
        client = http_of(served)
        session = await opened(client)
        body = {"input_ids": [999_999], "session_params": {"id": session}}
        assert (await client.post("/generate", json=body)).status_code == 400
        assert served.stores is not None
        assert await served.stores.sessions.turn("", session, None) == (1000, None)


async def test_without_a_store_there_are_no_sessions(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/open_session", json={"capacity_of_str_len": 10})
    assert answer.status_code == 400
    assert "--response-store" in answer.json()["error"]["message"]
