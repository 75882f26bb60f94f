"""Loading, listing and unloading adapters at run time."""

import asyncio
from collections.abc import Mapping

import pytest

from packages.frontend.tests.lora.adapter_server import (
    BOSS,
    HAIKU,
    KEYS,
    USER,
    WITH_HAIKU,
    EngineOf,
    HttpOf,
    ask,
    load,
    loads,
    sha,
    unload,
    unloads,
)
from tercet.frontend.testing import serving
from tercet.protocol.messages.values import LoRAAdapter, ModelLimits


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_an_adapter_comes_and_goes(adapting: EngineOf, http_of: HttpOf, prefix: str) -> None:
    engine = adapting(schedulers=["scheduler-0", "scheduler-1"])
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        loaded = await http.post(f"{prefix}/load_lora_adapter", json=HAIKU, headers=BOSS)
        assert (loaded.status_code, loaded.json()) == (
            200,
            {"success": True, "loaded_adapters": {"haiku": "/adapters/haiku"}},
        )
        unread = LoRAAdapter("/adapters/haiku")
        assert sorted(loads(engine)) == [("scheduler-0", unread), ("scheduler-1", unread)]
        answer = await ask(http)
        assert (answer.status_code, answer.json()["model"]) == (200, "haiku")
        read = LoRAAdapter("/adapters/haiku", sha("/adapters/haiku"))
        assert [each.lora for each in engine.requests()] == [read]
        gone = await http.post(f"{prefix}/unload_lora_adapter", json={"lora_name": "haiku"}, headers=BOSS)
        assert (gone.status_code, gone.json()) == (200, {"success": True, "loaded_adapters": {}})
        assert sorted(unloads(engine)) == [("scheduler-0", read), ("scheduler-1", read)]
        missing = await ask(http)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("route", ["/load_lora_adapter", "/v1/load_lora_adapter"])
async def test_only_administrators_load(adapting: EngineOf, http_of: HttpOf, route: str) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        for path in (route, route.replace("load", "unload")):
            assert (await http.post(path, json=HAIKU)).status_code == 401
            refused = await http.post(path, json=HAIKU, headers=USER)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")
    assert loads(engine) == []


async def test_what_one_scheduler_cannot_read_has_no_name(adapting: EngineOf, http_of: HttpOf) -> None:
    def adapter(peer: str, path: str) -> str:
        if peer == "scheduler-1":
            raise ValueError("there is no such directory.")
        return sha(path)

    async with serving(adapting(schedulers=["scheduler-0", "scheduler-1"], adapter=adapter), KEYS) as served:
        http = http_of(served)
        refused = await load(http)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_lora", "lora_path")
        assert error["message"] == "It cannot be read. scheduler-1: there is no such directory."
        assert (await ask(http)).status_code == 404
        assert [each["id"] for each in (await http.get("/v1/models", headers=USER)).json()["data"]] == ["tiny"]


async def test_schedulers_that_find_different_files_give_no_name(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting(schedulers=["scheduler-0", "scheduler-1"], adapter=lambda peer, _: f"of {peer}")
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        refused = await load(http)
        assert refused.status_code == 400
        assert "scheduler-0: of scheduler-0, scheduler-1: of scheduler-1" in refused.json()["error"]["message"]
        assert (await ask(http)).status_code == 404


async def test_a_scheduler_that_tells_no_digest_has_read_nothing(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting(adapter=lambda _peer, _path: ""), KEYS) as served:
        assert (await load(http_of(served))).status_code == 400


async def test_a_scheduler_that_says_nothing_gives_no_name(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting(schedulers=["scheduler-0", "scheduler-1"], silent={"scheduler-1"})
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        loading = asyncio.create_task(load(http))
        async with asyncio.timeout(10):
            while len(loads(engine)) < 2:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
        engine.down("scheduler-1")
        unheard = await loading
        assert (unheard.status_code, unheard.headers["retry-after"]) == (503, "1")
        assert "scheduler-1: it is gone" in unheard.json()["error"]["message"]
        assert (await ask(http)).status_code == 404
        assert (await load(http)).status_code == 200


async def test_a_name_can_be_given_again(adapting: EngineOf, http_of: HttpOf) -> None:
    contents = {"/a": "1", "/b": "2"}
    engine = adapting(adapter=lambda _peer, path: contents[path])
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        for path in ("/a", "/a", "/b"):
            assert (await load(http, path=path)).status_code == 200
            assert (await ask(http)).status_code == 200
        contents["/b"] = "3"
        assert (await load(http, path="/b")).json()["loaded_adapters"] == {"haiku": "/b"}
        assert (await ask(http)).status_code == 200
    expected = [("/a", "1"), ("/a", "1"), ("/b", "2"), ("/b", "3")]
    assert [each.lora for each in engine.requests()] == [LoRAAdapter(*each) for each in expected]


async def test_requests_in_flight_keep_what_their_name_stood_for(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting(auto=False)
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        await load(http, path="/a")
        running = asyncio.create_task(ask(http))
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
        engine.step()
        await load(http, path="/b")
        await unload(http)
        engine.down("scheduler-0")
        engine.scheduler_up("scheduler-0", "2")
        while not running.done():
            engine.step()
            await asyncio.sleep(0.002)
        answer = await running
    assert (answer.status_code, answer.json()["model"]) == (200, "haiku")
    first, second = engine.requests()
    assert (first.attempt, second.attempt, bool(second.resume)) == (0, 1, True)
    assert first.lora == second.lora == LoRAAdapter("/a", sha("/a"))


async def test_a_models_name_is_no_adapters(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        refused = await load(http_of(served), "tiny")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert loads(engine) == []


async def test_what_is_not_there_cannot_be_unloaded(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting(), KEYS) as served:
        for name in ("haiku", "tiny"):
            missing = await unload(http_of(served), name)
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_name")


async def test_what_has_another_name_too_is_not_forgotten(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        await load(http, "one")
        await load(http, "two")
        assert (await unload(http, "one")).status_code == 200
        assert unloads(engine) == []
        assert (await ask(http, "two")).status_code == 200
        assert (await unload(http, "two")).status_code == 200
    assert len(unloads(engine)) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "haiku"}, "lora_path"),
        ({**HAIKU, "lora_name": ""}, "lora_name"),
        ({**HAIKU, "lora_name": 7}, "lora_name"),
        ({**HAIKU, "lora_name": "n" * 257}, "lora_name"),
        ({**HAIKU, "lora_name": "two\nlines"}, "lora_name"),
        ({**HAIKU, "lora_name": "\u202eukiah"}, "lora_name"),
        ({**HAIKU, "lora_path": ""}, "lora_path"),
        ({**HAIKU, "lora_path": "p" * 4097}, "lora_path"),
        ({**HAIKU, "lora_path": "a\0b"}, "lora_path"),
        ({**HAIKU, "lora_path": ["/a"]}, "lora_path"),
        ({**HAIKU, "base_model": "other"}, "base_model"),
        ({**HAIKU, "lora_rank": 7}, "lora_rank"),
    ],
)
async def test_bodies_that_cannot_be_meant(
    adapting: EngineOf, http_of: HttpOf, body: Mapping[str, object], param: str
) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        refused = await http.post("/load_lora_adapter", json=body, headers=BOSS)
        assert refused.status_code == (404 if param == "base_model" else 400)
        assert refused.json()["error"]["param"] == param
        for garbage in (b"", b"[]", b"null", b"{", b"\xff"):
            head = {**BOSS, "content-type": "application/json"}
            for route in ("/load_lora_adapter", "/unload_lora_adapter"):
                assert (await http.post(route, content=garbage, headers=head)).status_code == 400
    assert loads(engine) == []


async def test_words_of_other_servers_are_taken(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting(), KEYS) as served:
        http = http_of(served)
        body = {**HAIKU, "pinned": True, "load_inplace": True, "base_model": "tiny"}
        assert (await http.post("/v1/load_lora_adapter", json=body, headers=BOSS)).status_code == 200
        body = {"lora_name": "haiku", "lora_int_id": 1}
        assert (await http.post("/v1/unload_lora_adapter", json=body, headers=BOSS)).status_code == 200


async def test_a_server_without_adapters_says_so(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, KEYS, WITH_HAIKU) as served:
        http = http_of(served)
        for refused in (await load(http, "sonnet"), await ask(http)):
            assert refused.status_code == 400
            assert "--max-loras" in refused.json()["error"]["message"]
    assert loads(engine) == []


async def test_only_schedulers_that_run_adapters_are_asked(
    adapting: EngineOf, http_of: HttpOf, limits: ModelLimits
) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        engine.limits = limits
        engine.scheduler_up("scheduler-1")
        http = http_of(served)
        assert (await load(http)).status_code == 200
        for _ in range(4):
            assert (await ask(http)).status_code == 200
    assert {peer for peer, _ in loads(engine)} == {"scheduler-0"}
    assert {peer for peer, each in engine.sent if each in engine.requests()} == {"scheduler-0"}


async def test_before_a_model_is_known_nothing_can_be_loaded(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting(), KEYS, connect=False) as served:
        http = http_of(served)
        for early in (await load(http), await unload(http), await ask(http)):
            assert (early.status_code, early.headers["retry-after"]) == (503, "1")


async def test_models_and_their_adapters_are_listed(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting(), KEYS) as served:
        http = http_of(served)
        await load(http, "org/haiku")
        base, card = (await http.get("/v1/models", headers=USER)).json()["data"]
        assert "parent" not in base
        assert (await http.get("/v1/models/org/haiku", headers=USER)).json() == card
    assert {name: card[name] for name in ("id", "object", "owned_by", "root", "parent", "max_model_len")} == {
        "id": "org/haiku",
        "object": "model",
        "owned_by": "tercet",
        "root": "/adapters/haiku",
        "parent": "tiny",
        "max_model_len": 128,
    }
    assert card.keys() - base.keys() == {"root", "parent"}
