"""Grammars are checked where they can do no harm."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import set_resumed_caller
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.frontend.structured_output.worker import MEMORY
from tercet.frontend.structured_output.worker_process import WorkerProcess
from tercet.protocol.messages.values import Grammar, GrammarKind, ModelIdentity, ModelLimits

HANGS = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer","multipleOf":99999999}')
"""Millions of states: minutes of processor time."""
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")


@pytest.fixture(scope="session")
def model(files: dict[str, bytes], limits: ModelLimits) -> ServedModel:
    return ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="weights-1"))


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(workers=2, max_waiting=2, seconds=0.4)
    yield made
    await made.close()


async def refusal(checker: GrammarChecker, grammar: Grammar, model: ServedModel) -> str:
    with pytest.raises(BadRequestError) as error:
        await checker.check(grammar, model, "regex")
    assert (error.value.param, error.value.code) == ("regex", "invalid_grammar")
    return error.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        DIGITS,
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        Grammar(GrammarKind.LARK, 'start: <[258]> "yes" | <|im_start|> "no"\n'),
    ],
)
async def test_what_compiles_passes(checker: GrammarChecker, model: ServedModel, grammar: Grammar) -> None:
    await checker.check(grammar, model)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(GrammarKind.REGEX, "(unclosed"), "unclosed"),
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"rhyme"}'), "rhyme"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"uniqueItems":true}'), "uniqueItems"),
        (Grammar(GrammarKind.JSON_SCHEMA, "no json"), "expected"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'), "NoExtension"),
        (Grammar(GrammarKind.LARK, "start: nowhere"), "nowhere"),
        (Grammar(GrammarKind.LARK, 'start: "a" start'), "Too many items"),
        (Grammar(GrammarKind.LARK, "start: <|no_such_token|>"), "no_such_token"),
    ],
)
async def test_what_does_not_compile_is_told_why(
    checker: GrammarChecker, model: ServedModel, grammar: Grammar, words: str
) -> None:
    assert words in await refusal(checker, grammar, model)


async def test_what_takes_too_long_costs_a_worker_and_nobody_else_anything(
    checker: GrammarChecker, model: ServedModel
) -> None:
    await checker.check(DIGITS, model)
    bomb = asyncio.create_task(refusal(checker, HANGS, model))
    waits: list[float] = []
    while not bomb.done():
        began = time.monotonic()
        await checker.check(Grammar(GrammarKind.REGEX, f"[0-9]{{{len(waits) + 1}}}"), model)
        waits.append(time.monotonic() - began)
    assert "too long" in await bomb
    assert len(waits) > 5
    assert sorted(waits)[len(waits) * 9 // 10] < 1
    before = time.monotonic()
    assert "too long" in await refusal(checker, HANGS, model)
    assert time.monotonic() - before < 0.5, "a bomb is remembered, not tried again"


async def test_all_the_bombs_of_one_key_leave_a_worker_to_the_others(model: ServedModel) -> None:
    checker = GrammarChecker(workers=2, max_waiting=10, seconds=0.4)
    await checker.check(DIGITS, model)

    async def throw() -> list[BaseException | None]:
        set_resumed_caller("bomber")
        bombs = [Grammar(GrammarKind.JSON_SCHEMA, f'{{"multipleOf":{99999900 + number}}}') for number in range(8)]
        return await asyncio.gather(*(checker.check(each, model) for each in bombs), return_exceptions=True)

    bombs = asyncio.create_task(throw())
    set_resumed_caller("another")
    waits: list[float] = []
    while not bombs.done():
        began = time.monotonic()
        await checker.check(Grammar(GrammarKind.REGEX, f"[0-9]{{{len(waits) + 1}}}"), model)
        waits.append(time.monotonic() - began)
    assert sorted(waits)[len(waits) * 9 // 10] < 1
    told = [type(each).__name__ for each in await bombs]
    assert (told.count("BadRequestError"), told.count("UnavailableError")) == (6, 2), "half of the line is its own"
    await checker.close()


async def test_what_takes_too_much_memory_is_refused(checker: GrammarChecker, model: ServedModel) -> None:
    # An intersection of three languages: hundreds of megabytes within seconds.
    pieces = " & ".join(f"/((?s:.)*{letter}(?s:.){{{9 + place}}})*/" for place, letter in enumerate("abcdef"))
    assert "too" in await refusal(checker, Grammar(GrammarKind.LARK, f"start: A\nA: {pieces}"), model)
    await checker.check(DIGITS, model)


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="only Linux tells what another process may take")
async def test_a_worker_may_take_little_more_memory_than_it_has(checker: GrammarChecker, model: ServedModel) -> None:
    await checker.check(DIGITS, model)
    [pid] = checker.pids
    soft, has = await asyncio.to_thread(address_space, pid)
    assert 0 < soft - has <= MEMORY


def address_space(pid: int) -> tuple[int, int]:
    """Return the limit and the size of a process's address space."""
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    [limit] = (line for line in limits if line.startswith("Max address space"))
    return int(limit.split()[3]), int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_killed_worker_is_replaced(checker: GrammarChecker, model: ServedModel) -> None:
    await checker.check(DIGITS, model)
    [pid] = checker.pids
    os.kill(pid, signal.SIGKILL)
    await checker.check(Grammar(GrammarKind.REGEX, "b"), model)
    assert checker.pids != [pid]


async def test_requests_that_ask_the_same_share_one_check(checker: GrammarChecker, model: ServedModel) -> None:
    many = [checker.check(Grammar(GrammarKind.REGEX, "[a-z]{3}"), model) for _ in range(100)]
    await asyncio.gather(*many)
    assert len(checker.pids) == 1


async def test_what_is_remembered_is_bounded_and_what_is_asked_most_lately_stays(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def try_out(self: WorkerProcess, grammar: Grammar, model: ServedModel, seconds: float) -> str:
        tried.append(grammar.text)
        return "it is bad" if grammar.text == "c" else ""

    monkeypatch.setattr(WorkerProcess, "check", try_out)
    checker = GrammarChecker(workers=2, max_results=2)
    for text in "abacab":
        await asyncio.gather(checker.check(Grammar(GrammarKind.REGEX, text), model), return_exceptions=True)
    assert tried == ["a", "b", "c", "b"]
    assert "it is bad" in await refusal(checker, Grammar(GrammarKind.REGEX, "c"), model)
    assert tried == ["a", "b", "c", "b", "c"]
    await checker.close()


async def test_no_more_wait_in_line_than_allowed(checker: GrammarChecker, model: ServedModel) -> None:
    asked = [checker.check(Grammar(GrammarKind.REGEX, f"x{number}"), model) for number in range(5)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert results[:4] == [None] * 4
    assert isinstance(results[4], UnavailableError)
    assert results[4].headers() == {"retry-after": "1"}


async def test_close_leaves_no_process(model: ServedModel) -> None:
    checker = GrammarChecker()
    await checker.check(DIGITS, model)
    [pid] = checker.pids
    await checker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def belongings(pid: int) -> tuple[bytes, set[str]]:
    """Return the environment and the open files of a process."""
    process = Path(f"/proc/{pid}")
    return (process / "environ").read_bytes(), {os.readlink(each) for each in (process / "fd").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells what another process has")
@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_worker_has_neither_keys_nor_the_frontends_sockets(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, new_event_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def look() -> tuple[bytes, set[str]]:
        checker = GrammarChecker()
        await checker.check(DIGITS, model)
        [pid] = checker.pids
        found = belongings(pid)
        await checker.close()
        return found

    monkeypatch.setenv("TERCET_API_KEYS", "secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)  # like a listener inherited from the supervisor
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            environment, descriptors = runner.run(look())
        assert b"secret" not in environment
        assert os.readlink(f"/proc/self/fd/{listener.fileno()}") not in descriptors


async def test_one_worker_serves_models_of_several_vocabularies(
    model: ServedModel, files: dict[str, bytes], limits: ModelLimits
) -> None:
    wider = msgspec.structs.replace(limits, vocab_size=limits.vocab_size + 8)
    other = ServedModel("other", ModelFiles(files), wider, ModelIdentity(weights="weights-2"))
    last = Grammar(GrammarKind.LARK, f"start: <[{wider.vocab_size - 1}]>")
    checker = GrammarChecker(workers=1)
    await checker.check(last, other)
    assert "too large" in await refusal(checker, last, model) or "token" in await refusal(checker, last, model)
    await checker.check(DIGITS, other)
    assert len(checker.pids) == 1
    await checker.close()
