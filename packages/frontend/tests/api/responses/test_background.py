"""Background responses: generation, following, cancellation, and takeover from dead frontends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tercet.frontend.api.responses import background as background_module
from tercet.frontend.api.responses import store as store_module
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]

BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "background": True}
WORDS = [f"{number} " for number in range(30)]


def counting(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    return [Token(10 + place, word) for place, word in enumerate(WORDS)]


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "responses.sqlite"))


async def ended(client: openai.AsyncOpenAI, response: str) -> Response:
    async with asyncio.timeout(20):
        while True:
            answer = await client.responses.retrieve(response)
            if answer.status not in {"queued", "in_progress"}:
                return answer
            await asyncio.sleep(0.02)


async def numbered(stream: AsyncIterator[ResponseStreamEvent]) -> list[ResponseStreamEvent]:
    return [event async for event in stream]


def text_of(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def die(served: Served) -> None:
    """Stop a frontend as SIGKILL does, with its leases, and let them expire."""
    assert served.stores is not None
    background = served.stores.background
    tasks = [*background._tasks.values(), background._poller]
    for task in tasks:
        assert task is not None
        task.cancel()
    await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)
    await served.stores._database.run(lambda each: each.execute("UPDATE responses SET lease = 0"))


async def until_running(served: Served) -> None:
    async with asyncio.timeout(10):
        while not served.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_it_is_queued_made_and_come_back_for(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting), store=store) as served:
        client = openai_of(served)
        queued = await client.responses.create(**BODY)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        made = await ended(client, queued.id)
        assert (made.status, made.output_text) == ("completed", "".join(WORDS))
        assert made.created_at == queued.created_at
        await served.until_idle()


async def test_its_stream_can_be_left_and_resumed(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(counting), store=store) as served:
        client = openai_of(served)
        stream = await client.responses.create(**BODY, stream=True)
        seen: list[ResponseStreamEvent] = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 9:
                break
        await stream.close()
        assert [event.type for event in seen[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        response = seen[0].response.id  # type: ignore[union-attr]
        rest = await numbered(await client.responses.retrieve(response, stream=True, starting_after=8))
        whole = [*seen, *rest]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert text_of(whole) == "".join(WORDS)
        assert whole[-1].type == "response.completed"
        again = await numbered(await client.responses.retrieve(response, stream=True))
        assert again == whole


async def test_a_stream_of_a_response_that_is_deleted_ends_and_says_so(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting, auto=False), store=store) as served:
        client = openai_of(served)
        stream = await client.responses.create(**BODY, stream=True)
        seen: list[Any] = [await anext(stream)]
        await client.responses.delete(seen[0].response.id)
        seen += await numbered(stream)
        await served.until_idle()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "error"
    assert "not found" in seen[-1].message


@pytest.mark.parametrize("verb", ["close", "delete"])
async def test_whoever_follows_no_more_leaves_nothing_and_disturbs_nobody(
    verb: str, engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting, auto=False), store=store) as served:
        assert served.stores is not None
        news = served.stores.background._new_events
        client = openai_of(served)
        stream = await client.responses.create(**BODY, stream=True)
        response = (await anext(stream)).response.id
        other = await client.responses.retrieve(response, stream=True)
        await anext(other)
        await until_running(served)
        async with asyncio.timeout(10):
            while response not in news:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await stream.close()
            if verb == "close":
                for _ in WORDS:
                    served.engine.step()
            else:
                await client.responses.delete(response)
            await numbered(other)
            await served.until_idle()
            while news:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def test_only_background_responses_are_streamed_again(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting), store=store) as served:
        client = openai_of(served)
        made = await client.responses.create(model="tiny", input="hello")
        with pytest.raises(openai.BadRequestError):
            await client.responses.retrieve(made.id, stream=True)


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_another_frontend_ends_it(
    verb: str, engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with (
        serving(engine_of(counting, auto=False), store=store) as owner,
        serving(engine_of(counting), store=store, peer="frontend-1") as other,
    ):
        queued = await openai_of(owner).responses.create(**BODY)
        await until_running(owner)
        owner.engine.step()
        client = openai_of(other)
        if verb == "cancel":
            cancelled = await client.responses.cancel(queued.id)
            assert cancelled.status == "cancelled"
        else:
            await client.responses.delete(queued.id)
        await owner.until_idle()
        assert not owner.engine.running
        assert [abort.rid for abort in owner.engine.aborts()] == [owner.engine.requests()[0].rid]
        if verb == "cancel":
            assert (await client.responses.retrieve(queued.id)).status == "cancelled"
            assert await client.responses.cancel(queued.id) == cancelled


async def test_a_request_that_cannot_be_taken_is_refused_at_once(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting), store=store) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await openai_of(served).responses.create(**{**BODY, "input": "hello " * 200})
        assert error.value.code == "context_length_exceeded"


async def test_another_frontend_finishes_a_background_response_exactly_once(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting), connect=False, store=store, peer="frontend-1") as heir:
        async with serving(engine_of(counting, auto=False), store=store) as dying:
            stream = await openai_of(dying).responses.create(**BODY, stream=True, extra_body={"seed": 7})
            await until_running(dying)
            dying.engine.step()
            dying.engine.step()
            seen: list[ResponseStreamEvent] = []
            async for event in stream:
                seen.append(event)
                if text_of(seen) == "".join(WORDS[:2]):
                    break
            await stream.close()
            await die(dying)
            response = seen[0].response.id  # type: ignore[union-attr]
            await heir.connect()
            client = openai_of(heir)
            follower = await client.responses.retrieve(response, stream=True, starting_after=seen[-1].sequence_number)
            whole = [*seen, *await numbered(follower)]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert text_of(whole) == "".join(WORDS)
        made = await client.responses.retrieve(response)
        assert (made.status, made.output_text) == ("completed", "".join(WORDS))
        assert heir.engine.requests()[0].sampling.seed == 7


async def test_a_frontend_that_leaves_hands_its_work_on(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(counting, auto=False), store=store) as leaving:
        queued = await openai_of(leaving).responses.create(**BODY)
        await until_running(leaving)
    async with serving(engine_of(counting), store=store, peer="frontend-1") as heir:
        made = await ended(openai_of(heir), queued.id)
        assert (made.status, made.output_text) == ("completed", "".join(WORDS))


async def test_its_id_ends_it_whoever_makes_it(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(counting, auto=False), store=store) as leaving:
        queued = [await openai_of(leaving).responses.create(**BODY) for _ in range(2)]
        await until_running(leaving)
        await openai_of(leaving).post("../abort_request", body={"rid": queued[0].id}, cast_to=object)
        first = await ended(openai_of(leaving), queued[0].id)
    async with serving(engine_of(counting, auto=False), store=store, peer="frontend-1") as heir:
        await until_running(heir)
        await openai_of(heir).post("../abort_request", body={"rid": queued[1].id}, cast_to=object)
        second = await ended(openai_of(heir), queued[1].id)
    for made in (first, second):
        assert made.error is not None
        assert (made.status, made.error.message) == ("failed", "The request was aborted.")


async def test_what_fails_again_and_again_is_given_up(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    engine = engine_of(counting, auto=False)
    async with serving(engine, store=store) as served:
        client = openai_of(served)
        stream = await client.responses.create(**BODY, stream=True)
        for dispatches in range(1, 4):
            async with asyncio.timeout(10):
                while len(engine.requests()) < dispatches:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await die(served)
            assert served.stores is not None
            served.stores.start()
        events = await numbered(stream)
        assert events[-1].type == "response.failed"
        assert (await client.responses.retrieve(events[-1].response.id)).status == "failed"
        assert len(engine.requests()) == 3


async def test_a_key_has_a_bounded_number_of_followers(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_module, "MAX_FOLLOWERS", 2)
    async with serving(engine_of(counting), store=store) as served:
        client = openai_of(served)
        made = await client.responses.create(**BODY)
        background = served.stores.background if served.stores else None
        assert background is not None
        leave = [background.join("") for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="Too many streams of background responses"):
            await client.responses.retrieve(made.id, stream=True)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**BODY, stream=True)
        leave[0]()
        events = await numbered(await client.responses.retrieve(made.id, stream=True))
        assert text_of(events) == "".join(WORDS)
        assert background._followers[""] == 1, "who has read all of it follows no more"


async def test_followers_share_what_is_read(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers read a long response in pages."""
    monkeypatch.setattr(background_module, "MAX_EVENTS", 7)
    monkeypatch.setattr(store_module, "MAX_EVENTS", 7)
    async with serving(engine_of(counting), store=store) as served:
        client = openai_of(served)
        made = await client.responses.create(**BODY)
        whole = await ended(client, made.id)
        assert served.stores is not None
        background, reads = served.stores.background, 0
        read = background._store.events

        async def counted(owner: str, response: str, after: int) -> tuple[list[bytes], bool]:
            nonlocal reads
            reads += 1
            return await read(owner, response, after)

        monkeypatch.setattr(background._store, "events", counted)

        async def follow() -> list[bytes]:
            return [event async for event in background.follow("", made.id, -1)]

        told = await asyncio.gather(*(follow() for _ in range(20)))
        assert all(each == told[0] for each in told)
        assert whole.output_text in told[0][-1].decode().replace("\\n", "\n")
        assert reads == -(-len(told[0]) // 7) + (len(told[0]) % 7 == 0)
