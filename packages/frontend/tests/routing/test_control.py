"""Control requests to all schedulers, and aborts by other clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.routing.control import Answer, Control
from tercet.frontend.routing.peers import PeerRegistry
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.messages import AbortReq, ControlReply, FlushCacheReq, Message, PauseGenerationReq
from tercet.protocol.messages.values import Role

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]
ADMIN = {"authorization": "Bearer boss"}
KEYS = HttpConfig(api_key=("user",), admin_key=("boss",))
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 100}


def endless_script(request: object, index: int) -> list[Token]:
    return [Token(5, "x")] * 100


async def dispatched(engine: FakeEngine, count: int) -> None:
    async with asyncio.timeout(10):
        while len(engine.requests()) < count:  # noqa: ASYNC110 - the engine tells nobody what it was sent
            await asyncio.sleep(0.001)


class RecordingSender:
    """Sender that only records messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.full: set[str] = set()

    def send(self, peer: str, message: Message, *frames: object) -> bool:
        self.sent.append((peer, message))
        return peer not in self.full


def fleet_of(*schedulers: str) -> PeerRegistry:
    registry = PeerRegistry()
    for peer in schedulers:
        registry.add(peer, Role.SCHEDULER, "1")
    return registry


async def asked(control: Control) -> "asyncio.Task[dict[str, Answer]]":
    task = asyncio.create_task(control.broadcast(lambda number: FlushCacheReq(id=number)))
    await asyncio.sleep(0)
    return task


async def test_an_order_is_done_when_every_scheduler_has_said_so() -> None:
    wire = RecordingSender()
    control = Control(wire, fleet_of("a", "b"))
    task = await asked(control)
    [(_, first), (_, second)] = wire.sent
    assert first == second
    assert isinstance(first, FlushCacheReq)
    control.on_reply("a", ControlReply(id=first.id, ok=True, message="3 pages freed"))
    control.on_reply("stranger", ControlReply(id=first.id, ok=False))
    control.on_reply("b", ControlReply(id="another", ok=False))
    await asyncio.sleep(0)
    assert not task.done()
    control.on_reply("b", ControlReply(id=first.id, ok=True))
    assert await task == {"a": Answer(ok=True, message="3 pages freed"), "b": Answer(ok=True)}


async def test_whoever_leaves_or_cannot_be_reached_has_not_obeyed() -> None:
    wire = RecordingSender()
    wire.full.add("b")
    control = Control(wire, fleet_of("a", "b"))
    task = await asked(control)
    control.on_peer_down("a")
    answers = await task
    assert not answers["a"].ok
    assert not answers["b"].ok


async def test_silence_ends_an_order() -> None:
    answers = await Control(RecordingSender(), fleet_of("a"), timeout=0.01).broadcast(
        lambda number: PauseGenerationReq(id=number)
    )
    assert answers == {"a": Answer(ok=False, message="it has not answered", answered=False)}


async def test_without_schedulers_there_is_nobody_to_wait_for() -> None:
    assert await Control(RecordingSender(), PeerRegistry()).broadcast(lambda number: FlushCacheReq(id=number)) == {}


@pytest.mark.parametrize("route", ["/flush_cache", "/pause_generation", "/continue_generation"])
async def test_what_concerns_everybody_needs_the_admin_key(engine_of: EngineOf, http_of: HttpOf, route: str) -> None:
    engine = engine_of()
    async with serving(engine, KEYS) as served:
        http = http_of(served)
        assert (await http.post(route)).status_code == 401
        refused = await http.post(route, headers={"authorization": "Bearer user"})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_key_required"
        obeyed = await http.post(route, headers=ADMIN)
    assert obeyed.status_code == 200
    assert obeyed.json() == {"success": True, "schedulers": {"scheduler-0": "done"}}


async def test_an_order_that_not_everybody_obeys_is_a_503_that_says_who_did_not(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answers(_self: Control, _order: object, **_: object) -> dict[str, Answer]:
        return {"b": Answer(ok=False, message="it has not answered"), "a": Answer(ok=True)}

    monkeypatch.setattr(Control, "broadcast", answers)
    async with serving(engine_of(), KEYS) as served:
        failed = await http_of(served).post("/pause_generation", headers=ADMIN)
    error = failed.json()["error"]
    assert (failed.status_code, failed.headers["retry-after"], error["type"]) == (503, "1", "server_error")
    assert "a: done, b: it has not answered" in error["message"]


async def test_an_open_server_has_no_administrators(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        http = http_of(served)
        assert (await http.post("/flush_cache", headers=ADMIN)).status_code == 403
        assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 403
        assert (await http.get("/v1/models")).status_code == 200


async def test_the_admin_key_opens_every_route_and_may_stand_in_either_header(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of(), KEYS) as served:
        http = http_of(served)
        assert (await http.get("/v1/models", headers=ADMIN)).status_code == 200
        assert (await http.get("/v1/models", headers={"x-api-key": "user"})).status_code == 200
        assert (await http.get("/v1/models", headers={"x-api-key": "wrong"})).status_code == 401
        assert (await http.get("/v1/models", headers={"authorization": "Basic user"})).status_code == 401


async def test_a_stream_that_is_aborted_ends_with_an_error(
    engine_of: EngineOf, openai_of: OpenAIOf, http_of: HttpOf
) -> None:
    engine = engine_of(endless_script)
    async with serving(engine) as served:
        stream = await openai_of(served, strict=False).completions.create(**BODY, stream=True)
        await anext(aiter(stream))
        [request] = engine.requests()
        answer = await http_of(served).post("/abort_request", json={"rid": request.rid})
        assert answer.json() == {"success": True}
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "request_aborted"
        await served.until_idle()
    assert [abort.rid for abort in engine.aborts()] == [request.rid]
    assert engine.running == []


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_the_id_of_a_completion_is_enough(
    engine_of: EngineOf, openai_of: OpenAIOf, http_of: HttpOf, route: str
) -> None:
    engine = engine_of(endless_script)
    async with serving(engine) as served:
        client = openai_of(served, strict=False)
        stream: Any
        if route == "chat":
            messages: Any = [{"role": "user", "content": "hello"}]
            stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=100, stream=True)
        else:
            stream = await client.completions.create(**{**BODY, "prompt": ["one", "two"]}, stream=True)
        first = await anext(aiter(stream))
        assert "frontend-0-" in first.id
        assert (await http_of(served).post("/abort_request", json={"rid": first.id})).status_code == 200
        with pytest.raises(openai.APIError, match="aborted"):
            async for _ in stream:
                pass
        await served.until_idle()
    assert engine.running == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 100, "store": False}),
    ],
)
async def test_so_is_the_id_of_a_message_and_of_a_response(
    engine_of: EngineOf, http_of: HttpOf, path: str, fields: dict[str, Any]
) -> None:
    engine = engine_of(endless_script, auto=False)
    async with serving(engine) as served:
        http = http_of(served)
        asked = asyncio.create_task(http.post(path, json={"model": "tiny", "stream": True, **fields}))
        await dispatched(engine, 1)
        engine.step()
        prefix = "msg_" if path == "/v1/messages" else "resp_"
        public = prefix + engine.requests()[0].rid
        assert (await http.post("/abort_request", json={"rid": public})).status_code == 200
        told = (await asked).text
        await served.until_idle()
    assert f'"id":"{public}"' in told
    assert "The request was aborted." in told
    assert engine.running == []


async def test_a_request_of_another_frontend_is_looked_for_everywhere(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(endless_script)
    engine.schedulers.append("scheduler-1")
    async with serving(engine) as served:
        await http_of(served).post("/abort_request", json={"rid": "frontend-9-abc"})
    abort = AbortReq(rid="frontend-9-abc", reason="aborted by request", user_requested=True)
    told = [(peer, message) for peer, message in engine.sent if isinstance(message, AbortReq)]
    assert told == [("scheduler-0", abort), ("scheduler-1", abort)]


async def test_what_another_frontend_was_asked_to_end_does_not_go_on(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    engine = engine_of(endless_script)
    async with serving(engine) as served:
        waiting = asyncio.create_task(openai_of(served).completions.create(**BODY, n=2))
        await dispatched(engine, 1)
        [request] = engine.requests()
        engine.end_as_asked(request.rid)
        with pytest.raises(openai.APIStatusError) as caught:
            await waiting
        assert caught.value.status_code == 499
        assert caught.value.code == "request_aborted"
        await served.until_idle()
    assert len(engine.requests()) == 1, "it was dispatched again"


async def test_abort_all_ends_everybodys(engine_of: EngineOf, openai_of: OpenAIOf, http_of: HttpOf) -> None:
    engine = engine_of(endless_script)
    async with serving(engine, KEYS) as served:
        client = openai_of(served, api_key="user")
        waiting = [asyncio.create_task(client.completions.create(**BODY)) for _ in range(3)]
        await dispatched(engine, 3)
        assert (
            await http_of(served).post("/abort_request", json={"abort_all": True}, headers=ADMIN)
        ).status_code == 200
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, openai.APIStatusError)
            assert outcome.code == "request_aborted"
    assert AbortReq(rid="", reason="all are aborted", user_requested=True) in engine.aborts()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rid": "a", "abort_all": True},
        {"rid": ""},
        {"rid": "chatcmpl-"},
        {"rid": "cmpl-"},
        {"rid": "msg_"},
        {"rid": "a" * 513},
        {"rid": 5},
    ],
)
async def test_what_names_no_request_is_refused(engine_of: EngineOf, http_of: HttpOf, body: dict[str, Any]) -> None:
    async with serving(engine_of()) as served:
        assert (await http_of(served).post("/abort_request", json=body)).status_code == 400
