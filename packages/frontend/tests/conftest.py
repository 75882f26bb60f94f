"""Tiny byte-level model, and clients that are closed with their test."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import openai
import pytest
import uvicorn.server
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.frontend.http.auth import Caller, set_caller
from tercet.frontend.testing import FakeEngine, Script, Served, Token
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import ModelLimits

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "user assistant system", "hello world, how are you?"] * 4


@pytest.fixture(scope="session", autouse=True)
def _quick_stops() -> Iterator[None]:
    """Let a stopping server look every millisecond whether its connections are closed, not every 100."""

    def quick_sleep(_: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": quick_sleep}))
        yield


@pytest.fixture(autouse=True)
def _no_caller() -> Iterator[None]:
    """Reset the caller after each test; a test that is no coroutine sets it for all tests of its process."""
    yield
    set_caller({}, Caller())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    trained.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    trained.add_tokens([AddedToken("<think>", normalized=False)])
    return trained


@pytest.fixture(scope="session")
def files(tokenizer: Tokenizer) -> dict[str, bytes]:
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "bos_token": None}).encode(),
        "chat_template.jinja": CHATML.encode(),
    }


@pytest.fixture(scope="session")
def limits(tokenizer: Tokenizer) -> ModelLimits:
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return ModelLimits(
        model="tiny",
        context_length=128,
        vocab_size=size,
        max_total_tokens=4096,
        eos_token_ids=[258],
        grammars="llguidance 1.9.1",
    )


def hello_world(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    return [Token(10, "Hello"), Token(11, " wor"), Token(12, "ld"), Token(13, "!")]


@pytest.fixture
def engine_of(files: dict[str, bytes], limits: ModelLimits) -> Callable[..., FakeEngine]:
    """Create engines that answer with a script, by default "Hello world!" in four tokens."""

    def make(script: Script = hello_world, **options: object) -> FakeEngine:
        chosen: dict[str, object] = {"files": files, "limits": limits, **options}
        return FakeEngine(script, **chosen)  # type: ignore[arg-type]

    return make


@pytest.fixture
def adapting(engine_of: Callable[..., FakeEngine], limits: ModelLimits) -> Callable[..., FakeEngine]:
    """Create engines with adapter support."""

    def make(script: Script = hello_world, **options: object) -> FakeEngine:
        return engine_of(script, limits=msgspec.structs.replace(limits, max_loras=4), **options)

    return make


@pytest.fixture
async def openai_of() -> AsyncIterator[Callable[..., openai.AsyncOpenAI]]:
    """Create clients that never retry and validate answers strictly."""
    clients: list[openai.AsyncOpenAI] = []

    def make(served: Served, *, strict: bool = True, **options: object) -> openai.AsyncOpenAI:
        chosen: dict[str, object] = {"api_key": "none", "max_retries": 0, **options}
        client = openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            _strict_response_validation=strict,
            **chosen,  # type: ignore[arg-type]
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def http_of() -> AsyncIterator[Callable[..., httpx2.AsyncClient]]:
    """Create plain HTTP clients of a server."""
    clients: list[httpx2.AsyncClient] = []

    def make(served: Served) -> httpx2.AsyncClient:
        clients.append(httpx2.AsyncClient(base_url=served.url))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()
