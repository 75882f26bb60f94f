"""Weight updates: messages to schedulers, requests in flight, fingerprints in answers."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.routing.peers import MAX_LINEAGE_ENTRIES, WeightLineage
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.messages import AbortReq, Heartbeat, Ready, UpdateWeightsFromDiskReq
from tercet.protocol.messages.values import Load, ModelIdentity, Phase, Role
from tercet.protocol.node import PeerReady

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
ADMIN = {"authorization": "Bearer boss"}
KEYS = HttpConfig(api_key=("user",), admin_key=("boss",))
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
PATH = "/checkpoints/7"
SHA = hashlib.sha256(PATH.encode()).hexdigest()


def six_tokens(request: object, index: int) -> list[Token]:
    return [Token(5, "x")] * 6


def update_requests(engine: FakeEngine) -> list[tuple[str, str]]:
    return [(peer, each.path) for peer, each in engine.sent if isinstance(each, UpdateWeightsFromDiskReq)]


async def update(http: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await http.post("/update_weights_from_disk", json={"model_path": PATH, **body}, headers=ADMIN)


async def fingerprint(http: httpx2.AsyncClient) -> str:
    answer = await http.post("/v1/completions", json=BODY, headers=ADMIN)
    assert answer.status_code == 200
    return str(answer.json()["system_fingerprint"])


async def test_every_scheduler_is_told_and_answers_are_of_the_new_weights(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    engine.schedulers = ["scheduler-0", "scheduler-1"]
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        before = await fingerprint(http)
        answer = await update(http)
        assert answer.status_code == 200
        assert answer.json() == {
            "success": True,
            "message": f"The weights are those of {PATH}.",
            "weights": {"scheduler-0": SHA, "scheduler-1": SHA},
        }
        assert update_requests(engine)[0][1] == PATH
        assert {peer for peer, _ in update_requests(engine)} == {"scheduler-0", "scheduler-1"}
        assert await fingerprint(http) != before


async def test_only_an_administrator_may(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, KEYS) as served:
        refused = await http_of(served).post(
            "/update_weights_from_disk", json={"model_path": PATH}, headers={"authorization": "Bearer user"}
        )
    assert refused.status_code == 403
    assert not update_requests(engine)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model_path": "checkpoints/7"}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"flush_cache": False}, "flush_cache"),
        ({"load_format": "dummy"}, "load_format"),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    engine_of: EngineOf, http_of: HttpOf, body: dict[str, Any], param: str
) -> None:
    engine = engine_of()
    async with serving(engine, KEYS) as served:
        refused = await update(http_of(served), **body)
    assert refused.status_code in {400, 404}
    assert refused.json()["error"]["param"] == param
    assert not update_requests(engine)


async def test_weights_that_a_scheduler_refuses_are_a_bad_request(engine_of: EngineOf, http_of: HttpOf) -> None:
    def refuse(peer: str, path: str) -> str:
        raise ValueError(f"{path!r} is no directory")

    engine = engine_of()
    engine.adapter = refuse
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        before = await fingerprint(http)
        refused = await update(http)
        assert await fingerprint(http) == before
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_weights", "model_path")
    assert error["message"] == f"The weights cannot be loaded. scheduler-0: '{PATH}' is no directory."


async def test_one_after_the_other_stops_at_the_first_that_does_not(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    engine.schedulers = ["scheduler-0", "scheduler-1", "scheduler-2"]
    refusing = {"scheduler-1"}

    def found(peer: str, path: str) -> str:
        if peer in refusing:
            raise ValueError("damaged")
        return path

    engine.adapter = found
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        assert (await update(http, rolling=True)).status_code == 400
        assert [peer for peer, _ in update_requests(engine)] == ["scheduler-0", "scheduler-1"]
        refusing.clear()
        assert (await update(http, rolling=True)).status_code == 200
        assert [peer for peer, _ in update_requests(engine)][2:] == ["scheduler-0", "scheduler-1", "scheduler-2"]


async def test_requests_can_be_ended_first(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, KEYS) as served:
        assert (await update(http_of(served), abort_all_requests=True)).status_code == 200
    aborts = [number for number, (_, each) in enumerate(engine.sent) if isinstance(each, AbortReq)]
    assert aborts
    assert aborts[0] < next(
        at for at, (_, each) in enumerate(engine.sent) if isinstance(each, UpdateWeightsFromDiskReq)
    )


async def test_a_request_continues_with_the_successor_of_its_weights(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(six_tokens, auto=False)
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        text = asyncio.create_task(http.post("/v1/completions", json={**BODY, "max_tokens": 6}, headers=ADMIN))
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110 - the engine tells nobody what it was sent
                await asyncio.sleep(0.001)
        engine.step()
        engine.step()
        assert (await update(http)).status_code == 200
        engine.down("scheduler-0")
        engine.weights = SHA
        engine.scheduler_up("scheduler-0", "2")
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        resumed = engine.requests()[-1]
        assert (resumed.attempt, len(resumed.resume[0].output_ids) // 4) == (1, 2)
        for _ in range(6):
            engine.step()
        answer = await text
    assert answer.json()["choices"][0]["text"] == "xxxxxx"


async def test_new_requests_go_where_they_need_not_wait(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    engine.schedulers = ["scheduler-0", "scheduler-1"]
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        waiting = Heartbeat(phase=Phase.IDLE, load=Load(updating=True))
        for _ in range(4):
            engine._from("scheduler-0", waiting)
            await fingerprint(http)
        sent = {peer for peer, each in engine.sent if each in engine.requests()}
        assert sent == {"scheduler-1"}


async def test_a_model_name_moves_with_the_first_updated_scheduler(
    engine_of: EngineOf, http_of: HttpOf, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    engine.schedulers = ["scheduler-0", "scheduler-1"]
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        old = await fingerprint(http)
        ready = Ready(limits=engine.limits, identity=ModelIdentity(weights="new", weights_path=PATH))
        engine._from("scheduler-1", PeerReady("scheduler-1", Role.SCHEDULER, ready))
        engine.sent.clear()
        for _ in range(3):
            assert await fingerprint(http) != old
        assert {peer for peer, each in engine.sent if each in engine.requests()} == {"scheduler-1"}
    assert not [record for record in caplog.records if "other weights" in record.message]


def test_weights_that_come_back_succeed_what_followed_them() -> None:
    weight_lineage = WeightLineage()
    for old, new in (("a", "b"), ("b", "c"), ("c", "a")):
        weight_lineage.record(old, new, f"/{new}")
    assert [weight_lineage.latest(each) for each in "abcd"] == ["a", "a", "a", "d"]
    assert weight_lineage.follows("a", "c")
    assert not weight_lineage.follows("c", "a")
    assert not weight_lineage.follows("a", "a")
    assert weight_lineage.path("a") == "/a"
    weight_lineage.forget("c")
    assert [weight_lineage.latest(each) for each in "bc"] == ["a", "c"]


def test_the_first_weights_and_the_last_are_remembered() -> None:
    weight_lineage = WeightLineage()
    for number in range(MAX_LINEAGE_ENTRIES + 500):
        weight_lineage.record(str(number), str(number + 1), f"/{number + 1}")
    last = str(MAX_LINEAGE_ENTRIES + 500)
    assert weight_lineage.latest("0") == weight_lineage.latest(str(MAX_LINEAGE_ENTRIES)) == last
    assert weight_lineage.latest("1") == "1"
    assert weight_lineage.path(last) == f"/{last}"
    assert len(weight_lineage._latest) == MAX_LINEAGE_ENTRIES
    assert len(weight_lineage._paths) == 1


async def restart(engine: FakeEngine, weights: str) -> None:
    """Restart the only scheduler with the weights of its command line."""
    engine.down("scheduler-0")
    engine.weights = weights
    engine.scheduler_up("scheduler-0", "2")


async def test_a_scheduler_that_starts_with_old_weights_is_given_the_new_ones(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    engine = engine_of()
    first = engine.weights
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        assert (await update(http)).status_code == 200
        new = await fingerprint(http)
        await restart(engine, first)
        assert await fingerprint(http) == new
        assert update_requests(engine) == [("scheduler-0", PATH)] * 2


async def test_old_weights_serve_on_where_the_new_ones_are_gone(
    engine_of: EngineOf, http_of: HttpOf, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    first = engine.weights
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        old = await fingerprint(http)
        assert (await update(http)).status_code == 200

        def gone(peer: str, path: str) -> str:
            raise ValueError("it is no directory")

        engine.adapter = gone
        await restart(engine, first)
        async with asyncio.timeout(10):
            while await fingerprint(http) != old:
                pass
    assert (
        "scheduler-0: loading the latest weights failed, keeping the outdated ones: it is no directory" in caplog.text
    )
