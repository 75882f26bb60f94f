"""Schedulers that only encode: texts are those of a server with whole schedulers, also after a death."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

pytest.importorskip("PIL")

from packages.frontend.tests.media.image_files import data_url, noise, saved
from packages.scheduler.tests.models.vision.checkpoint import write_gemma3
from packages.scheduler.tests.models.vision.qwen_checkpoint import write_qwen
from tests.server_process import Server

OPTIONS = ("--dtype", "float32", "--kv-cache-bytes", "64MiB", "--chunked-prefill-size", "64", "--context-length", "400")
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
CAT, DOG, BIRD = (data_url(saved(noise(*size, seed=seed))) for seed, size in enumerate([(61, 47), (30, 90), (40, 40)]))
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "gemma3": write_gemma3,
    "qwen2_5_vl": lambda directory: write_qwen(directory, "Qwen2_5_VL"),
    "qwen3_vl": lambda directory: write_qwen(directory, "Qwen3VL"),
}


def message(*parts: str) -> dict[str, Any]:
    """Return a message of texts and images."""
    shown = [
        {"type": "image_url", "image_url": {"url": each}}
        if each.startswith("data:")
        else {"type": "text", "text": each}
        for each in parts
    ]
    return {"role": "user", "content": shown}


CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([message("look at ", CAT)], {}),
    ([message("look at ", CAT, " and ", DOG, " and ", CAT)], {"n": 2}),
    ([message(DOG, "the other one")], {"seed": 3, "temperature": 0.9, "n": 2}),
    ([message("no image at all")], {}),
    ([message("look at ", CAT), {"role": "assistant", "content": "yes"}, message(BIRD)], {}),
]


def answers(server: Server) -> list[list[str | None]]:
    """Return the texts of all chats at once, and again, when their prefixes are cached."""

    def ask(client: OpenAI, chat: tuple[list[Any], dict[str, Any]]) -> list[str | None]:
        messages, options = chat
        answer = client.chat.completions.create(model="any", messages=messages, **{**GREEDY, **options})
        return [choice.message.content for choice in answer.choices]

    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(len(CHATS)) as pool,
    ):
        return [*pool.map(ask, [client] * len(CHATS), CHATS), *pool.map(ask, [client] * len(CHATS), CHATS)]


def encoders_of(server: Server) -> list[dict[str, Any]]:
    return [each for each in server.get("/server_info")["schedulers"] if each["encoder"]]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp("encoders") / "seeing")


@pytest.fixture
def whole(start: Callable[..., Server], directory: Path) -> Iterator[Server]:
    server = start(str(directory), *OPTIONS, "--served-model-name", "any").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture
def split(start: Callable[..., Server], directory: Path) -> Iterator[Server]:
    server = start(str(directory), *OPTIONS, "--served-model-name", "any", "--encoders", "2").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


def test_texts_are_those_of_whole_schedulers(whole: Server, split: Server) -> None:
    expected = answers(whole)
    assert answers(split) == expected
    assert [each["ready"] for each in encoders_of(split)] == [True, True]
    for process in [split.part(each["peer"]) for each in encoders_of(split)]:
        process.kill()
    assert answers(split) == expected, "images wait for encoders that return"
    assert split.get("/server_info")["deaths"]["scheduler"] >= 1
    assert "failed" not in split.get("/server_info")["requests_ended"]
