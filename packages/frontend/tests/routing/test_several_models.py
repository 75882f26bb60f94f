"""Schedulers of different models, and of different weights under one name."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx2
import msgspec

from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import unpack_ints

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


async def add_scheduler(served: Served, peer: str, model: str, weights: str) -> None:
    """Connect another scheduler and send its files."""
    engine = served.engine
    engine.limits, engine.weights = msgspec.structs.replace(engine.limits, model=model), weights
    engine.scheduler_up(peer)
    async with asyncio.timeout(10):
        while peer not in served.manager.models.peers:  # noqa: ASYNC110 - the files are read in a thread
            await asyncio.sleep(0.001)


def dispatched_to(engine: FakeEngine) -> list[str]:
    return [peer for peer, message in engine.sent if message in engine.requests()]


async def ask(http: httpx2.AsyncClient, model: str) -> httpx2.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "hello"})


async def test_each_model_is_listed_and_served_by_its_own_schedulers(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        http = http_of(served)
        await add_scheduler(served, "scheduler-1", "other", "weights-2")
        cards = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "other"]
        for model in ("other", "tiny", "other"):
            answer = await ask(http, model)
            assert (answer.status_code, answer.json()["model"]) == (200, model)
        assert (await ask(http, "third")).status_code == 404
        assert dispatched_to(served.engine) == ["scheduler-1", "scheduler-0", "scheduler-1"]


async def test_a_model_name_belongs_to_its_first_weights_until_they_are_gone(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        http = http_of(served)
        await add_scheduler(served, "scheduler-1", "tiny", "weights-2")
        for _ in range(4):
            assert (await ask(http, "tiny")).status_code == 200
        assert dispatched_to(served.engine) == ["scheduler-0"] * 4
        served.engine.down("scheduler-0")
        assert (await ask(http, "tiny")).status_code == 200
        assert dispatched_to(served.engine)[4:] == ["scheduler-1"]


async def test_a_session_goes_on_with_models_of_one_tokenizer_alone(
    engine_of: EngineOf, http_of: HttpOf, tmp_path: Path
) -> None:
    async with serving(engine_of(), store=StoreConfig(response_store=str(tmp_path / "kept.sqlite"))) as served:
        http, engine = http_of(served), served.engine
        await add_scheduler(served, "scheduler-1", "alike", "weights-2")
        engine.files = {**engine.files, "tokenizer.json": engine.files["tokenizer.json"] + b"\n"}
        await add_scheduler(served, "scheduler-2", "stranger", "weights-3")
        session = {"id": (await http.post("/open_session", json={"capacity_of_str_len": 100})).json()}
        first = await http.post("/generate", json={"model": "tiny", "input_ids": [1], "session_params": session})
        going_on = {"input_ids": [2], "session_params": {**session, "rid": first.json()["meta_info"]["id"]}}
        assert (await http.post("/generate", json={**going_on, "model": "alike"})).status_code == 200
        assert list(unpack_ints(engine.requests()[-1].input_ids)) == [1, 10, 11, 12, 13, 2]
        refused = await http.post("/generate", json={**going_on, "model": "stranger"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_params.rid")
        assert "another tokenizer than 'stranger'" in refused.json()["error"]["message"]


async def test_a_response_goes_on_with_any_model(engine_of: EngineOf, http_of: HttpOf, tmp_path: Path) -> None:
    async with serving(engine_of(), store=StoreConfig(response_store=str(tmp_path / "kept.sqlite"))) as served:
        http, engine = http_of(served), served.engine
        engine.files = {**engine.files, "tokenizer.json": engine.files["tokenizer.json"] + b"\n"}
        await add_scheduler(served, "scheduler-1", "other", "weights-2")
        first = (await http.post("/v1/responses", json={"model": "tiny", "input": "hello"})).json()["id"]
        body = {"model": "other", "input": "and you?", "previous_response_id": first}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        prompt = list(unpack_ints(engine.requests()[-1].input_ids))
        assert "assistant\nHello world!" in served.manager.models.get("other").tokenizer.decode(
            prompt, skip_special_tokens=False
        )
