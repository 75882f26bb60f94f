"""Models appear once a scheduler's files and limits are both here and sound."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from tercet.frontend.errors import ModelNotFoundError, UnavailableError
from tercet.frontend.fleet import SchedulerPeer
from tercet.frontend.model_registry import ModelRegistry
from tercet.frontend.served_model import ModelFiles, SamplingDefaults
from tercet.protocol.messages import TokenizerFiles
from tercet.protocol.values import ModelIdentity, ModelLimits


@pytest.fixture
async def registry() -> AsyncIterator[ModelRegistry]:
    with ThreadPoolExecutor(1) as pool:
        yield ModelRegistry(pool)


def message(files: dict[str, bytes]) -> TokenizerFiles:
    sums = [sha256(content).hexdigest() for content in files.values()]
    return TokenizerFiles(id="1", model="tiny", names=list(files), sha256=sums)


def frames(files: dict[str, bytes]) -> list[memoryview]:
    return [memoryview(content) for content in files.values()]


def peer(limits: ModelLimits | None, weights: str = "w") -> SchedulerPeer:
    return SchedulerPeer("s", "1", limits, ModelIdentity(weights=weights))


async def test_files_and_limits_make_a_model(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits
) -> None:
    with pytest.raises(UnavailableError):
        registry.get("tiny")
    assert not registry.register(peer(limits))
    await registry.load("s", message(files), frames(files))
    assert not registry.register(peer(None))
    assert registry.register(peer(limits))
    model = registry.get("tiny")
    with pytest.raises(ModelNotFoundError):
        registry.get("other")
    assert registry.register(peer(limits))
    assert registry.get("tiny") is model
    assert registry.register(peer(limits, "v"))
    assert registry.get("tiny").identity.weights == "v"


async def test_equal_files_are_read_once(registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits) -> None:
    await registry.load("s", message(files), frames(files))
    await registry.load("t", message(files), frames(files))
    assert registry.peers == {"s", "t"}
    registry.register(peer(limits))
    first = registry.get("tiny").files
    registry.register(SchedulerPeer("t", "1", limits, ModelIdentity(weights="w")))
    assert registry.get("tiny").files is first
    registry.forget("s")
    assert registry.peers == {"t"}


async def test_damaged_and_useless_files_are_not_used(registry: ModelRegistry, files: dict[str, bytes]) -> None:
    torn = {**files, "tokenizer.json": files["tokenizer.json"][:-9]}
    await registry.load("s", message(files), frames(torn))
    await registry.load("s", message(files), frames({**files, "chat_template.jinja": b"another"}))
    await registry.load("s", message(files), frames(files)[:1])
    await registry.load("s", message(torn), frames(torn))
    await registry.load("s", message({"config.json": b"{}"}), frames({"config.json": b"{}"}))
    bad = {**files, "chat_template.jinja": b"{% for %}"}
    await registry.load("s", message(bad), frames(bad))
    assert registry.peers == set()


def test_sampling_defaults_are_the_models(files: dict[str, bytes]) -> None:
    config = b'{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": "x", "do_sample": true}'
    assert ModelFiles({**files, "generation_config.json": config}).defaults == SamplingDefaults(0.6, 0.95, 20)
    assert ModelFiles(files).defaults == SamplingDefaults()
