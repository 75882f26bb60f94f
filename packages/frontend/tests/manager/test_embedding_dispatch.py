"""Dispatch of embedding inputs: windows, aborts, dead and full schedulers, missing vectors."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from packages.frontend.tests import encoders
from tercet.frontend.manager.embedding_state import MAX_IN_FLIGHT
from tercet.frontend.model.embedding_request import EmbeddingRequest, TextInput
from tercet.frontend.routing.policies import CacheAware
from tercet.frontend.testing import EncodingEngine, Script, Served, managed, serving
from tercet.protocol.messages.messages import AbortReq, Heartbeat, Rejected, TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits, Phase, Role, unpack_ints
from tercet.protocol.testing import ScriptedClock

Http = Callable[[Served], httpx2.AsyncClient]


def no_output(request: object, index: int) -> list[Any]:
    raise AssertionError("nothing is generated here")


def engine(limits: ModelLimits | None = None, **options: Any) -> EncodingEngine:
    script: Script = no_output
    return EncodingEngine(script, files=encoders.files(), limits=limits or encoders.limits(), **options)


async def until_held(fake: EncodingEngine, count: int) -> None:
    async with asyncio.timeout(10):
        while len(fake.inputs) < count:  # noqa: ASYNC110 - an engine tells nobody
            await asyncio.sleep(0.002)


async def test_a_large_request_goes_a_window_at_a_time(http_of: Http) -> None:
    fake = engine(auto=False)
    async with serving(fake) as served:
        body = {"model": "encoder", "input": [[5 + place % 15] for place in range(MAX_IN_FLIGHT + 40)]}
        asking = asyncio.create_task(http_of(served).post("/v1/embeddings", json=body))
        await until_held(fake, MAX_IN_FLIGHT)
        assert len(fake.inputs) == MAX_IN_FLIGHT
        fake.step()
        await until_held(fake, 40)
        fake.step()
        data = (await asking).json()["data"]
        assert [each["embedding"][1] for each in data] == [5 + place % 15 for place in range(MAX_IN_FLIGHT + 40)]
        assert len({each.rid for each in fake.asked()}) == MAX_IN_FLIGHT + 40


async def test_a_client_that_leaves_aborts_every_input(http_of: Http) -> None:
    fake = engine(auto=False)
    async with serving(fake) as served:
        asking = asyncio.create_task(
            http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": ["cat", "dog", "rain"]})
        )
        await until_held(fake, 3)
        asking.cancel()
        await served.until_idle()
        assert fake.inputs == []
        assert sorted(each.rid for each in fake.aborts()) == sorted(each.rid for each in fake.asked())


async def test_one_input_that_fails_ends_the_request_and_aborts_the_others(http_of: Http) -> None:
    def vector(request: TokenizedEmbeddingReqInput) -> Sequence[float] | FinishReason:
        if unpack_ints(request.input_ids)[1] == 7:
            return FinishReason(FinishType.ERROR, message="the model gave no finite numbers")
        return [1.0, 0.0, 0.0, 0.0]

    fake = engine(vector=vector)
    async with serving(fake) as served:
        answer = await http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": ["cat", "dog"]})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the model gave no finite numbers")
        await served.until_idle()


async def test_an_input_too_large_for_the_machine_is_the_clients_to_shorten(http_of: Http) -> None:
    finish = FinishReason(FinishType.ERROR, message="there is not the memory", code="context_length_exceeded")
    async with serving(engine(vector=lambda _: finish)) as served:
        answer = await http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": "cat"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        told = error["message"], error["code"], error["param"]
        assert told == ("there is not the memory", "context_length_exceeded", "input")


async def test_a_scheduler_that_dies_costs_nothing(http_of: Http) -> None:
    fake = engine(auto=False, schedulers=["scheduler-0", "scheduler-1"])
    async with serving(fake) as served:
        asking = asyncio.create_task(
            http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": ["cat", "dog", "rain", "a"]})
        )
        await until_held(fake, 4)
        fake.down("scheduler-0")
        await until_held(fake, 4)
        assert {peer for peer, _ in fake.inputs} == {"scheduler-1"}
        assert sorted(request.attempt for _, request in fake.inputs) == [0, 0, 1, 1]
        fake.down("scheduler-1")  # no scheduler has them now, and those dispatched twice are exclusive
        assert fake.inputs == []
        fake.scheduler_up("scheduler-2")
        for count in (3, 1):  # exclusive ones run one at a time
            await until_held(fake, count)
            assert sum(request.exclusive for _, request in fake.inputs) == 1
            fake.step()
        answer = await asking
        assert [each["embedding"][0] for each in answer.json()["data"]] == [3.0] * 4
        assert served.manager.counters.resumed_finished == 4


async def test_what_schedulers_die_of_ends_with_the_third_and_nothing_else_does(http_of: Http) -> None:
    fake = engine(auto=False)
    async with serving(fake) as served:
        http = http_of(served)
        killer = asyncio.create_task(http.post("/v1/embeddings", json={"model": "encoder", "input": "dog"}))
        await until_held(fake, 1)
        bystander = asyncio.create_task(http.post("/v1/embeddings", json={"model": "encoder", "input": "cat"}))
        await until_held(fake, 2)
        for number in (1, 2):
            fake.down(f"scheduler-{number - 1}")
            fake.scheduler_up(f"scheduler-{number}")
            await until_held(fake, 1)
        alone = []
        for number in range(3, 20):  # each runs exclusively now; the culprit crashes the scheduler once more
            [(_, request)] = fake.inputs
            alone.append(request.exclusive)
            if unpack_ints(request.input_ids)[1] == 7:
                fake.down(f"scheduler-{number - 1}")
                fake.scheduler_up(f"scheduler-{number}")
            else:
                fake.step()
            await asyncio.sleep(0)
            if killer.done() and bystander.done():
                break
            async with asyncio.timeout(10):
                while not fake.inputs and not (killer.done() and bystander.done()):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            if not fake.inputs:
                break
        assert all(alone)
        assert (await killer).status_code == 500
        assert (await bystander).status_code == 200


async def test_a_full_scheduler_sends_inputs_to_another_under_the_same_attempt(http_of: Http) -> None:
    def refuse(request: TokenizedEmbeddingReqInput) -> Rejected | None:
        if request.attempt == 0 and len(fake.asked()) == 1:
            return Rejected(rid=request.rid, attempt=0, code="overloaded", message="full", retry=True)
        return None

    fake = engine(schedulers=["scheduler-0", "scheduler-1"], refuse=refuse)
    async with serving(fake) as served:
        answer = await http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": "cat"})
        assert answer.status_code == 200
        assert [each.attempt for each in fake.asked()] == [0, 0]
        assert len({peer for peer, _ in fake.sent if peer}) == 2


async def test_an_abort_by_the_id_of_the_http_request_ends_all_its_inputs(http_of: Http) -> None:
    fake = engine(auto=False)
    async with serving(fake) as served:
        asking = asyncio.create_task(
            http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": ["cat", "dog"]})
        )
        await until_held(fake, 2)
        served.manager.requests.abort(fake.asked()[0].rid.partition(".")[0])
        answer = await asking
        assert answer.json()["error"]["code"] == "request_aborted"
        assert len([message for _, message in fake.sent if isinstance(message, AbortReq)]) == 2


async def test_an_input_whose_vector_was_lost_is_asked_for_again() -> None:
    clock, fake = ScriptedClock(), engine()
    asked = EmbeddingRequest(model="encoder", inputs=[TextInput("cat")], params=["input"])
    async with managed(fake, clock=clock) as manager:
        asking = asyncio.create_task(manager.embed(asked))
        await until_held(fake, 1)
        fake.step(lost=True)
        while not fake.inputs:
            clock.advance(0.5)
            fake._from("scheduler-0", Heartbeat(phase=Phase.IDLE))
            assert clock.now < 1100
        assert [request.attempt for _, request in fake.inputs] == [1]
        fake.step()
        assert (await asking).tokens == 3


async def test_inputs_go_to_the_least_loaded_whatever_they_begin_with(http_of: Http) -> None:
    fake = engine(auto=False, schedulers=["scheduler-0", "scheduler-1"])
    async with serving(fake) as served:
        served.manager.requests.dispatcher._policy = CacheAware()
        body = {"model": "encoder", "input": ["the cat sat on the mat"] * 10}
        asking = asyncio.create_task(http_of(served).post("/v1/embeddings", json=body))
        await until_held(fake, 10)
        assert sorted(peer for peer, _ in fake.inputs) == ["scheduler-0"] * 5 + ["scheduler-1"] * 5
        fake.step()
        await asking


async def test_vectors_that_make_no_sense_are_passed_over(http_of: Http) -> None:
    fake = engine(auto=False)
    async with serving(fake) as served:
        asking = asyncio.create_task(http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": "cat"}))
        await until_held(fake, 1)
        [(_, request)] = fake.inputs
        batch, frame = fake._vectors([request])
        fake._from("scheduler-0", batch)
        fake._from("scheduler-0", batch, memoryview(frame[:-4]))
        fake._from("scheduler-0", batch, memoryview(frame), memoryview(frame))
        assert not served.manager.requests.states[request.rid].done
        fake.step()
        assert (await asking).status_code == 200


async def test_every_input_lost_with_a_message_is_asked_for_again(http_of: Http) -> None:
    fake = engine(auto=False, schedulers=["scheduler-0", "scheduler-1"])
    async with serving(fake) as served:
        asking = asyncio.create_task(
            http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": ["cat", "dog"]})
        )
        await until_held(fake, 2)
        fake.step(lost=True)
        fake.down("scheduler-0", Role.SCHEDULER)
        fake.down("scheduler-1", Role.SCHEDULER)
        fake.scheduler_up("scheduler-0", "2")
        await until_held(fake, 2)
        fake.step()
        assert len(json.loads((await asking).content)["data"]) == 2
