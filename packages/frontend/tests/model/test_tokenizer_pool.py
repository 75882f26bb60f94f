"""Threads, timeouts and limits of rendering and tokenization."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import pytest

from packages.frontend.tests import encoders
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import Caller, set_caller
from tercet.frontend.model import served_model
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.frontend.model.tokenizer_pool import LONG, Piece, TokenizerPool, characters_in
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, serving
from tercet.protocol.messages.values import Task

EngineOf = Callable[..., FakeEngine]
EngineFor = Callable[[str], FakeEngine]
Routes = list[tuple[str, dict[str, Any]]]
HttpOf = Callable[[Served], httpx2.AsyncClient]

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COUNTING = {
    "/tokenize": "prompt",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses/input_tokens": "input",
}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Release waiting threads at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def pool(gate: threading.Event) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made
        gate.set()


async def test_what_is_slow_is_its_sender_s_and_what_has_to_wait_is_not(
    pool: ThreadPoolExecutor, gate: threading.Event
) -> None:
    work = TokenizerPool(pool, seconds=0.05)
    ran: list[str] = []
    slow = asyncio.create_task(work.run(Piece(gate.wait)))
    behind = asyncio.create_task(work.run(Piece(lambda: ran.append("behind"))))
    with pytest.raises(BadRequestError, match=r"within 0\.05 seconds"):
        await slow
    with pytest.raises(UnavailableError) as late:
        await behind
    assert late.value.retry_after == 1
    gate.set()
    assert await TokenizerPool(pool).run(Piece(lambda: "next")) == "next"
    assert ran == [], "nobody waits for it any more"


async def test_work_that_begins_late_has_its_whole_time(pool: ThreadPoolExecutor, gate: threading.Event) -> None:
    work = TokenizerPool(pool, seconds=0.2)
    first = asyncio.create_task(work.run(Piece(gate.wait)))
    asyncio.get_running_loop().call_later(0.15, gate.set)
    pause = threading.Event()
    second = asyncio.create_task(work.run(Piece(lambda: pause.wait(0.12))))
    assert await first is True
    assert await second is False, "it took 0.12 s, and its turn came after 0.15 s"


async def test_a_fault_of_the_work_is_told_as_it_is(pool: ThreadPoolExecutor) -> None:
    def refuse() -> None:
        raise BadRequestError("no", param="prompt")

    with pytest.raises(BadRequestError) as refused:
        await TokenizerPool(pool).run(Piece(refuse))
    assert refused.value.param == "prompt"


def by(owner: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Create a job for the caller with this key."""

    async def visit() -> Any:
        set_caller({}, Caller(owner))
        return await work

    return asyncio.create_task(visit())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("owners", [("mallory", "alice"), ("", "")])
async def test_a_batch_of_many_prompts_does_not_delay_another_request(
    pool: ThreadPoolExecutor, gate: threading.Event, owners: tuple[str, str]
) -> None:
    """Holds within one key, and without keys, too: few prompts of a request are queued at a time."""
    work, ran = TokenizerPool(pool), list[str]()

    def wait(name: str) -> None:
        gate.wait()
        ran.append(name)

    def piece(name: str) -> Piece[None]:
        return Piece(partial(wait, name), 16_000)

    first, second = owners
    flood = [by(first, work.run_all([piece("flood")] * 500)) for _ in range(3)]
    await asyncio.sleep(0)
    await until(lambda: len(work._queue) == 3 * 4 - 1)
    late = by(second, work.run(piece("hi")))
    await until(lambda: len(work._queue) == 3 * 4)
    gate.set()
    await late
    assert ran.index("hi") <= (2 if first else 3 * 4)
    for each in flood:
        each.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await until(lambda: not work._running.total())
    assert not work._queue
    assert not work._pieces


async def test_once_a_prompt_is_refused_no_other_of_its_request_is_tokenized(pool: ThreadPoolExecutor) -> None:
    work, ran = TokenizerPool(pool), list[int]()

    def tokenize(number: int) -> int:
        ran.append(number)
        if number == 3:
            raise BadRequestError("too long")
        return number

    assert await work.run_all([Piece(partial(tokenize, number)) for number in range(3)]) == [0, 1, 2]
    with pytest.raises(BadRequestError, match="too long"):
        await work.run_all([Piece(partial(tokenize, number)) for number in range(500)])
    await until(lambda: not work._running.total())
    assert len(ran) < 12
    assert not work._queue


async def test_long_texts_leave_a_thread_to_short_ones(gate: threading.Event) -> None:
    with ThreadPoolExecutor(2) as pool:
        work = TokenizerPool(pool, threads=2)
        long = [by(owner, work.run(Piece(gate.wait, LONG))) for owner in ("", "mallory", "")]
        await asyncio.sleep(0)
        for owner in ("", "alice"):
            assert await by(owner, work.run(Piece(lambda: "hi", 2))) == "hi"
        assert not any(each.done() for each in long)
        gate.set()
        await asyncio.gather(*long)


async def test_one_key_leaves_a_thread_to_others(gate: threading.Event) -> None:
    with ThreadPoolExecutor(2) as pool:
        work = TokenizerPool(pool, threads=2)
        flood = [by("mallory", work.run(Piece(gate.wait, 10))) for _ in range(3)]
        await asyncio.sleep(0)
        assert await by("alice", work.run(Piece(lambda: "hi", 2))) == "hi"
        assert not any(each.done() for each in flood)
        gate.set()
        await asyncio.gather(*flood)


async def test_one_key_fills_half_of_the_queue(pool: ThreadPoolExecutor, gate: threading.Event) -> None:
    work = TokenizerPool(pool, most=1000)
    asked = [by("mallory", work.run(Piece(gate.wait, 100))) for _ in range(9)]
    await asyncio.sleep(0)
    assert [each.done() for each in asked] == [False] * 6 + [True] * 3, "one has a thread, and 5 wait"
    refused = asked[-1].exception()
    assert isinstance(refused, UnavailableError)
    assert (refused.code, refused.retry_after) == ("overloaded", 1)
    others = [by("alice", work.run(Piece(gate.wait, 100))) for _ in range(5)]
    whole = by("bob", work.run(Piece(gate.wait, 5000)))
    await asyncio.sleep(0)
    assert not any(each.done() for each in (*others, whole)), "what is alone waits, however long it is"
    gate.set()
    await asyncio.gather(*asked[:6], *others, whole)


def test_a_chat_of_very_many_parts_counts_as_long() -> None:
    assert characters_in([{"role": "user", "content": "four"}, {"content": [{"text": "five5"}]}]) == 13
    assert characters_in([[1]] * 2000) == LONG


@pytest.mark.parametrize("path", COUNTING)
async def test_text_longer_than_anybody_counts_is_refused_untokenized(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """64 characters for each of the 128 tokens of the context exceed the other limit."""
    monkeypatch.setattr(served_model, "_COUNTED_CHARS", 100)
    async with serving(engine_of()) as served:
        http = http_of(served)
        for length, status in ((8000, 200), (8193, 400)):
            text = "x" * length
            body: dict[str, Any] = {"model": "tiny", COUNTING[path]: text}
            if path == "/v1/messages/count_tokens":
                body["messages"] = [{"role": "user", "content": text}]
            answer = await http.post(path, json=body)
            assert answer.status_code == status
    assert "At most 8192 are counted" in answer.text
    if path == "/tokenize":
        assert answer.json()["error"]["code"] == "string_above_max_length"


GENERATING: Routes = [
    ("/tokenize", {"prompt": "hello"}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/messages/count_tokens", CHAT),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": "hello"}),
    ("/v1/responses", {"model": "tiny", "input": "hello"}),
    ("/v1/completions", {"model": "tiny", "prompt": "hello"}),
    ("/v1/completions", {"model": "tiny", "prompt": ["hello", "world"]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}),
    ("/v1/messages", CHAT | {"max_tokens": 5}),
    ("/generate", {"text": "hello"}),
]
ENCODING: Routes = [
    ("/v1/embeddings", {"model": "encoder", "input": ["cat"] * 200}),
    ("/v1/rerank", {"model": "encoder", "query": "cat", "documents": ["dog", "rain"]}),
    ("/v1/score", {"model": "encoder", "text_1": "cat", "text_2": "dog"}),
    ("/v1/classify", {"model": "encoder", "input": "cat"}),
]


@pytest.fixture
def engine_for(engine_of: EngineOf) -> Callable[[str], FakeEngine]:
    """Create an engine for the kind of a route."""

    def make(path: str) -> FakeEngine:
        if path not in dict(ENCODING):
            return engine_of()
        classifies = path == "/v1/classify"
        limits = encoders.limits(Task.CLASSIFY, ("bad", "good")) if classifies else encoders.limits()
        vector = [0.5] * limits.width
        return EncodingEngine(lambda _request, _index: [], encoders.files(), limits, vector=lambda _request: vector)

    return make


@pytest.mark.parametrize(("path", "body"), GENERATING + ENCODING)
async def test_every_route_s_text_goes_there(
    engine_for: EngineFor, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    async def turned_away(self: TokenizerPool, piece: Piece[Any]) -> Any:
        raise UnavailableError("Too many texts wait to be tokenized.", retry_after=1)

    async with serving(engine_for(path)) as served:
        monkeypatch.setattr(TokenizerPool, "run", turned_away)
        answer = await http_of(served).post(path, json=body)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(("path", "body"), GENERATING + ENCODING)
async def test_no_route_tokenizes_or_renders_on_the_event_loop(
    engine_for: EngineFor, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    worked: list[tuple[str, int]] = []

    def noting(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            worked.append((name, threading.get_ident()))
            return work(*given, **named)

        return noted

    async with serving(engine_for(path)) as served:
        monkeypatch.setattr(TemplateManager, "render", noting("render", TemplateManager.render))
        for name in ("encode", "decode"):
            monkeypatch.setattr(PromptTokenizer, name, noting(name, getattr(PromptTokenizer, name)))
        answer = await http_of(served).post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert worked
    assert threading.get_ident() not in {thread for _, thread in worked}
    assert ("render" in dict(worked)) == ("messages" in body or "response" in path)


async def test_a_slow_text_holds_up_no_planning(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text threads are separate from those for planning grammars."""
    names: list[str] = []
    tokenize = ServedModel.prompt_ids

    def remembered(self: ServedModel, *given: Any, **named: Any) -> list[int]:
        names.append(threading.current_thread().name)
        return tokenize(self, *given, **named)

    monkeypatch.setattr(ServedModel, "prompt_ids", remembered)
    async with serving(engine_of()) as served:
        http = http_of(served)
        for path, body in (("/tokenize", {"prompt": "hello"}), ("/v1/chat/completions", CHAT)):
            assert (await http.post(path, json=body)).status_code == 200
        used = await asyncio.to_thread(lambda: threading.current_thread().name)
    assert len(names) == 2
    assert used.rpartition("_")[0] not in {name.rpartition("_")[0] for name in names}
