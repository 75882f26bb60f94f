"""Models appear once a scheduler's valid files and limits have arrived."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import msgspec
import pytest

from tercet.frontend.errors import ModelNotFoundError, UnavailableError
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.model.served_model import ModelFiles, SamplingDefaults
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.peers import SchedulerPeer, WeightLineage
from tercet.protocol.messages.messages import TokenizerFiles
from tercet.protocol.messages.values import ModelIdentity, ModelLimits


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
    return SchedulerPeer("s", "1", limits=limits, identity=ModelIdentity(weights=weights))


async def test_files_and_limits_make_a_model(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits
) -> None:
    with pytest.raises(UnavailableError):
        registry.get("tiny")
    registry.update([peer(limits)], WeightLineage())
    assert list(registry) == []
    await registry.load("s", message(files), frames(files))
    registry.update([peer(None)], WeightLineage())
    assert list(registry) == []
    registry.update([peer(limits)], WeightLineage())
    model = registry.get("tiny")
    with pytest.raises(ModelNotFoundError):
        registry.get("other")
    registry.update([peer(limits)], WeightLineage())
    assert registry.get("tiny") is model
    registry.update([], WeightLineage())
    assert registry.get("tiny") is model
    registry.update([peer(limits, "v")], WeightLineage())
    assert registry.get("tiny").identity.weights == "v"


async def test_an_unknown_model_waits_while_a_scheduler_is_not_ready(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits
) -> None:
    await registry.load("s", message(files), frames(files))
    loading = SchedulerPeer("t", "1")
    registry.update([peer(limits), loading], WeightLineage())
    with pytest.raises(UnavailableError):
        registry.get("other")
    registry.update([peer(limits)], WeightLineage())
    with pytest.raises(ModelNotFoundError):
        registry.get("other")


async def test_a_scheduler_whose_files_are_of_no_use_says_nothing_more(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits
) -> None:
    await registry.load("s", message(files), frames(files))
    broken = files | {"tokenizer.json": b"{"}
    await registry.load("t", message(broken), frames(broken))
    registry.update(
        [peer(limits), SchedulerPeer("t", "1", limits=limits, identity=ModelIdentity(weights="w"))], WeightLineage()
    )
    with pytest.raises(ModelNotFoundError):
        registry.get("other")


async def test_schedulers_that_are_expected_are_waited_for_with_patience(
    files: dict[str, bytes], limits: ModelLimits
) -> None:
    now = 0.0
    with ThreadPoolExecutor(1) as pool:
        registry = ModelRegistry(pool, expected=2, timeout=60.0, clock=lambda: now)
        await registry.load("s", message(files), frames(files))
        registry.update([peer(limits)], WeightLineage())
        with pytest.raises(UnavailableError):
            registry.get("other")
        now = 61.0
        with pytest.raises(ModelNotFoundError):
            registry.get("other")


async def test_of_models_that_an_operator_named_no_others_are_waited_for(
    files: dict[str, bytes], limits: ModelLimits
) -> None:
    with ThreadPoolExecutor(1) as pool:
        registry = ModelRegistry(pool, ["mine"], expected=2, timeout=60.0)
        await registry.load("s", message(files), frames(files))
        registry.update([peer(limits)], WeightLineage())
        assert registry.get("mine")
        with pytest.raises(ModelNotFoundError):
            registry.get("other")


async def test_of_two_weights_under_one_name_the_first_stay_while_they_are_there(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("s", "t"):
        await registry.load(name, message(files), frames(files))
    first, second = peer(limits), SchedulerPeer("t", "1", limits=limits, identity=ModelIdentity(weights="v"))
    registry.update([first], WeightLineage())
    for _ in range(3):
        registry.update([second, first], WeightLineage())
    assert registry.get("tiny").identity.weights == "w"
    assert [record.getMessage() for record in caplog.records] == [
        "t: other weights under the same name, routing no requests to it model=tiny weights=v"
    ]
    registry.update([second], WeightLineage())
    assert registry.get("tiny").identity.weights == "v"


async def test_a_fingerprint_stays_while_any_scheduler_of_its_version_does(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits
) -> None:
    async def up(name: str, software: str, weights: str = "w") -> SchedulerPeer:
        await registry.load(name, message(files), frames(files))
        identity = ModelIdentity(weights=weights)
        return SchedulerPeer(name, "1", limits=limits, identity=identity, software=software)

    def told(*schedulers: SchedulerPeer) -> str:
        registry.update(schedulers, WeightLineage())
        return registry.get("tiny").fingerprint

    stranger = await up("r", "1", weights="v")
    first, second, newer = await up("s", "1"), await up("t", "1"), await up("u", "2")
    old = told(first)
    assert told(first, second) == told(second) == told(newer, second) == told() == old
    new = told(stranger, newer)
    assert registry.get("tiny").identity.weights == "w"
    assert new != old
    assert told(first, newer) == new


async def test_every_models_schedulers_are_served(
    registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits
) -> None:
    for name in ("s", "t"):
        await registry.load(name, message(files), frames(files))
    other = msgspec.structs.replace(limits, model="other")
    registry.update(
        [peer(limits), SchedulerPeer("t", "1", limits=other, identity=ModelIdentity(weights="v"))], WeightLineage()
    )
    assert {(model.name, model.identity.weights) for model in registry} == {("tiny", "w"), ("other", "v")}


async def test_equal_files_are_read_once(registry: ModelRegistry, files: dict[str, bytes], limits: ModelLimits) -> None:
    await registry.load("s", message(files), frames(files))
    await registry.load("t", message(files), frames(files))
    assert registry.peers == {"s", "t"}
    registry.update([peer(limits)], WeightLineage())
    first = registry.get("tiny")
    registry.update([SchedulerPeer("t", "1", limits=limits, identity=ModelIdentity(weights="w"))], WeightLineage())
    assert registry.get("tiny") is first
    registry.forget("s")
    assert registry.peers == {"t"}


async def test_an_operators_template_is_that_of_every_model(files: dict[str, bytes], limits: ModelLimits) -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
    served = []
    with ThreadPoolExecutor(1) as pool:
        for template in (None, "mine", "yours"):
            registry = ModelRegistry(pool, chat_template=template)
            await registry.load("s", message(files), frames(files))
            registry.update([peer(limits)], WeightLineage())
            served.append(registry.get("tiny"))
            assert (await served[-1].render_end(chat) == template) == (template is not None)
    assert len({model.fingerprint for model in served}) == 3


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


async def test_whose_files_are_of_no_use_is_told_once_of_each(files: dict[str, bytes]) -> None:
    told: list[tuple[str, str]] = []
    bad = {**files, "chat_template.jinja": b"{% for %}"}
    with ThreadPoolExecutor(1) as pool:
        registry = ModelRegistry(pool, on_unreadable=lambda peer, reason: told.append((peer, reason)))
        for peer_id in ("s", "t", "s"):
            await registry.load(peer_id, message(bad), frames(bad))
    assert [peer_id for peer_id, _ in told] == ["s", "t"]
    assert told[1][1].startswith("the tokenizer files of t are of no use: the chat template does not parse")


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "tokenizer_config.json", "config.json", "sentence_bert_config.json"],
)
@pytest.mark.parametrize("content", [b"x", b"[]", b"\xff"])
def test_a_file_that_holds_no_object_is_named(files: dict[str, bytes], name: str, content: bytes) -> None:
    with pytest.raises(ValueError, match=rf"^{name} (cannot be read as JSON|holds no JSON object)"):
        ModelFiles({**files, name: content})


def test_sampling_defaults_are_the_models(files: dict[str, bytes]) -> None:
    config = b'{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": "x", "do_sample": true}'
    assert ModelFiles({**files, "generation_config.json": config}).defaults == SamplingDefaults(0.6, 0.95, 20)
    assert ModelFiles(files).defaults == SamplingDefaults()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b'{"temperature": NaN}', "temperature is not a finite number"),
        (b'{"temperature": 1e308}', r"generation_config\.json: .*temperature"),
        (b'{"top_p": -1}', r"generation_config\.json: .*top_p"),
        (b'{"top_k": 20.5}', r"generation_config\.json: .*top_k"),
        (b'{"repetition_penalty": 0}', r"generation_config\.json: .*repetition_penalty"),
    ],
)
def test_defaults_that_no_request_may_have_are_refused(files: dict[str, bytes], config: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ModelFiles({**files, "generation_config.json": config})


def test_what_a_file_raises_is_a_value_error_of_one_line(files: dict[str, bytes]) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        for content in (b"\xff", b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900):
            if name != "chat_template.jinja" or content == b"\xff":
                with pytest.raises(ValueError, match=r"^[^\n]+$"):
                    ModelFiles({**files, name: content})
