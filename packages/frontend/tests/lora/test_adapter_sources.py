"""Sources of adapter names: the shared database and options; and the choice of a base model."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from packages.frontend.tests import encoders
from packages.frontend.tests.lora.adapter_server import (
    KEYS,
    USER,
    WITH_HAIKU,
    EngineOf,
    HttpOf,
    ask,
    load,
    loads,
    retry_until_status,
    sha,
    unload,
)
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import EncodingEngine, serving
from tercet.protocol.messages.values import LoRAAdapter, ModelLimits


async def test_names_outlive_a_frontend_in_its_store_alone(adapting: EngineOf, http_of: HttpOf, tmp_path: Path) -> None:
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    for kept in (StoreConfig(), store):
        async with serving(adapting(), KEYS, store=kept) as served:
            assert (await load(http_of(served))).status_code == 200
        engine = adapting()
        async with serving(engine, KEYS, store=kept) as served:
            answer = await ask(http_of(served))
        if kept is store:
            assert answer.status_code == 200
            assert [each.lora for each in engine.requests()] == [LoRAAdapter("/adapters/haiku", sha("/adapters/haiku"))]
            assert loads(engine) == []
        else:
            assert answer.status_code == 404


async def test_frontends_with_one_store_have_the_same_names(
    adapting: EngineOf, http_of: HttpOf, tmp_path: Path
) -> None:
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    async with (
        serving(adapting(), KEYS, store=store) as mine,
        serving(adapting(), KEYS, store=store, peer="frontend-1") as yours,
    ):
        assert (await ask(http_of(yours))).status_code == 404
        await load(http_of(mine))
        assert (await ask(http_of(yours))).status_code == 200
        assert len((await http_of(yours).get("/v1/models", headers=USER)).json()["data"]) == 2
        await unload(http_of(yours))
        assert (await ask(http_of(mine))).status_code == 404


async def test_a_name_that_a_model_takes_later_is_the_models(
    adapting: EngineOf, http_of: HttpOf, limits: ModelLimits, tmp_path: Path
) -> None:
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    async with serving(adapting(), KEYS, store=store) as served:
        await load(http_of(served))
    engine = adapting()
    async with serving(engine, KEYS, store=store, names=("tiny", "haiku")) as served:
        assert (await ask(http_of(served))).status_code == 200
    assert [each.lora for each in engine.requests()] == [None]


# Options.


async def test_an_option_is_learnt_when_a_scheduler_is_there(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting(silent={"scheduler-0"})
    async with serving(engine, KEYS, WITH_HAIKU) as served:
        http = http_of(served)
        early = await ask(http)
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert "still loading" in early.json()["error"]["message"]
        assert len((await http.get("/v1/models", headers=USER)).json()["data"]) == 1
        engine.silent.clear()
        engine.down("scheduler-0")
        engine.scheduler_up("scheduler-0", "2")
        await retry_until_status(served, 200)
        assert len((await http.get("/v1/models", headers=USER)).json()["data"]) == 2
    assert engine.requests()[-1].lora == LoRAAdapter("/adapters/haiku", sha("/adapters/haiku"))


async def test_an_option_is_learnt_at_once(adapting: EngineOf) -> None:
    async with serving(adapting(), KEYS, WITH_HAIKU, connect=False) as served:
        assert served.manager._ticking is not None
        served.manager._ticking.cancel()  # periodic work is not needed
        await served.connect()
        await retry_until_status(served, 200)


async def test_an_option_that_a_scheduler_refuses_is_tried_with_the_next(
    adapting: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    found: dict[str, str] = {}

    def adapter(peer: str, path: str) -> str:
        if path not in found:
            raise ValueError("no such directory")
        return found[path]

    engine = adapting(adapter=adapter)
    async with serving(engine, KEYS, WITH_HAIKU) as served:
        refused = await retry_until_status(served, 400)
        assert refused.json()["error"]["code"] == "invalid_lora"
        assert "scheduler-0: no such directory" in refused.json()["error"]["message"]
        served.manager.tick()
        await asyncio.sleep(0.01)
        assert len(loads(engine)) == 1
        served.manager.adapters.tick(again=True)
        while len(loads(engine)) < 2:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert len([each for each in caplog.records if "no such directory" in each.getMessage()]) == 1
        found["/adapters/haiku"] = "1"
        engine.scheduler_up("scheduler-1")
        await retry_until_status(served, 200)
    assert len(loads(engine)) == 4


async def test_what_an_option_names_stays(adapting: EngineOf, http_of: HttpOf, tmp_path: Path) -> None:
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    async with serving(adapting(), KEYS, store=store) as served:
        await load(http_of(served), path="/another")
    engine = adapting()
    async with serving(engine, KEYS, WITH_HAIKU, store=store) as served:
        await retry_until_status(served, 200)
        http = http_of(served)
        assert (await load(http)).status_code == 200
        for refused in (await load(http, path="/another"), await unload(http)):
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
        listed = (await http.get("/v1/models", headers=USER)).json()["data"]
        assert [each.get("root") for each in listed] == [None, "/adapters/haiku"]
    assert engine.requests()[-1].lora == LoRAAdapter("/adapters/haiku", sha("/adapters/haiku"))


async def test_an_option_that_was_refused_can_be_loaded(adapting: EngineOf, http_of: HttpOf) -> None:
    found: list[str] = []

    def adapter(peer: str, path: str) -> str:
        if path not in found:
            raise ValueError("no such directory")
        return "1"

    async with serving(adapting(adapter=adapter), KEYS, WITH_HAIKU) as served:
        await retry_until_status(served, 400)
        found += ["/adapters/haiku", "/another"]
        assert (await load(http_of(served), path="/another")).status_code == 400
        assert (await load(http_of(served))).status_code == 200
        assert (await ask(http_of(served))).status_code == 200


# Several models.


async def test_of_several_models_one_has_to_be_named(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        engine.limits = msgspec.structs.replace(engine.limits, model="other")
        engine.weights = "weights-2"
        engine.scheduler_up("scheduler-1")
        await retry_until_status(served, 200, "other")
        http = http_of(served)
        refused = await load(http)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "base_model")
        assert (await load(http, base_model="other")).status_code == 200
        assert {peer for peer, _ in loads(engine)} == {"scheduler-1"}
        for name, status in {"haiku": 200, "other:haiku": 200, "tiny:haiku": 404}.items():
            answer = await ask(http, name)
            assert answer.status_code == status
            assert status == 404 or answer.json()["model"] == name
        body = {"text": "hello", "model": "tiny", "lora_path": "haiku"}
        refused = await http.post("/generate", json=body, headers=USER)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        assert (await load(http, base_model="tiny")).status_code == 200
        assert (await ask(http, "other:haiku")).status_code == 404
        assert (await ask(http, "tiny:haiku")).status_code == 200


async def test_an_option_is_of_one_model(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting()
    async with serving(engine, KEYS, WITH_HAIKU) as served:
        await retry_until_status(served, 200)
        engine.limits = msgspec.structs.replace(engine.limits, model="other")
        engine.weights = "weights-2"
        engine.scheduler_up("scheduler-1")
        await retry_until_status(served, 200, "other")
        answers = [await ask(http_of(served), name) for name in ("haiku", "tiny:haiku", "other:haiku")]
    assert [each.status_code for each in answers] == [200, 200, 404]


async def test_a_plain_name_goes_before_one_with_a_model(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting()
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        await load(http, "haiku", "/a")
        await load(http, "tiny:haiku", "/b")
        assert (await ask(http, "tiny:haiku")).status_code == 200
        assert (await ask(http, "haiku")).status_code == 200
    assert [each.lora and each.lora.path for each in engine.requests()] == ["/b", "/a"]


async def test_a_models_of_vectors_needs_no_naming(http_of: HttpOf, limits: ModelLimits) -> None:
    """Models without adapter support are no candidates."""
    engine = EncodingEngine(lambda _request, _index: [], encoders.files(), encoders.limits())
    async with serving(engine, KEYS) as served:
        refused = await load(http_of(served))
    assert refused.status_code == 400
    assert "--max-loras" in refused.json()["error"]["message"]
