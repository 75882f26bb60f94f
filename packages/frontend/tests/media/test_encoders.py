"""Images of a model without a tower: an encoder has each first, and its death costs nothing but time."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec
import pytest
from tokenizers import Tokenizer

pytest.importorskip("PIL")

from packages.frontend.tests.media.image_files import data_url, noise, saved
from packages.frontend.tests.media.seeing import image, seeing, text, user
from packages.frontend.tests.polling import until
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.messages import (
    AbortReq,
    ExclusiveReady,
    Message,
    Ready,
    Rejected,
    TokenizedGenerateReqInput,
)
from tercet.protocol.messages.values import FinishReason, FinishType, ModelIdentity, ModelLimits, Role
from tercet.protocol.node import PeerReady, PeerUp

HttpOf = Callable[[Served], httpx2.AsyncClient]
CAT, DOG = (data_url(saved(noise(20, 30, seed=seed))) for seed in (1, 2))
ARRAYS = [noise(20, 30, seed=seed).resize((6, 2), 2).tobytes() for seed in (1, 2)]


@dataclass
class Encoding:
    """An engine with schedulers that only encode: embeddings are the first byte of an array."""

    engine: FakeEngine
    form: EmbeddingForm
    answers: bool = True
    finish: FinishReason | None = None
    refusal: str = ""
    asked: list[tuple[str, EncodeMediaReq, bytes]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    def up(self, peer: str) -> None:
        """Make an encoder ready."""
        self.engine.schedulers.append(peer)
        self.engine._from(peer, PeerUp(peer, Role.SCHEDULER, "1"))
        self.engine._from(peer, PeerReady(peer, Role.SCHEDULER, Ready(encoder=self.form)))

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Handle a message of the frontend."""
        if isinstance(message, AbortReq):
            self.aborts.append(message.rid)
        if not isinstance(message, EncodeMediaReq):
            return FakeEngine.send(self.engine, peer, message, *frames)
        if peer not in self.engine.schedulers:
            return False
        [array] = frames
        self.asked.append((peer, message, bytes(array)))
        if message.deferred:
            offer = ExclusiveReady(rid=message.rid, attempt=message.attempt)
            asyncio.get_running_loop().call_soon(self.engine._from, peer, offer)
        elif self.answers:
            asyncio.get_running_loop().call_soon(self.answer, len(self.asked) - 1)
        return True

    def answer(self, number: int = -1, *, size: int = 0) -> None:
        """Answer a request, by default the latest."""
        peer, request, array = self.asked[number]
        if self.refusal:
            refused = Rejected(rid=request.rid, attempt=request.attempt, code=self.refusal, message="no", retry=True)
            self.engine._from(peer, refused)
            return
        answer = EncodedMedia(rid=request.rid, attempt=request.attempt, finish=self.finish, queue_time=0.1)
        made = memoryview(embeddings(array) if not size else bytes(size))
        self.engine._from(peer, answer, *([] if self.finish else [made]))


def embeddings(array: bytes) -> bytes:
    """Return three embeddings of two numbers of 4 bytes."""
    return array[:1] * 24


@pytest.fixture
def encoding(
    engine_of: Callable[..., FakeEngine], files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> Encoding:
    engine = seeing(engine_of, files, limits, tokenizer)
    form = EmbeddingForm(width=2, dtype="float32", tower="tower", images=engine.limits.images)
    engine.limits = msgspec.structs.replace(engine.limits, images=None, embeddings=form)
    made = Encoding(engine, form)
    engine.send = made.send  # type: ignore[method-assign]
    return made


@pytest.fixture
async def served(encoding: Encoding) -> AsyncIterator[Served]:
    async with serving(encoding.engine) as running:
        yield running


def body(*urls: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [user(*(image(url) for url in urls), text("look"))], "max_tokens": 4, **more}


def dispatched(encoding: Encoding) -> list[tuple[TokenizedGenerateReqInput, list[bytes]]]:
    frames = [[bytes(frame) for frame in each] for each in encoding.engine.frames]
    return list(zip(encoding.engine.requests(), frames, strict=True))


async def test_embeddings_take_the_place_of_arrays(served: Served, encoding: Encoding, http_of: HttpOf) -> None:
    encoding.up("encoder-0")
    answer = await http_of(served).post("/v1/chat/completions", json=body(CAT, DOG, CAT, n=2))
    assert answer.status_code == 200, answer.text
    assert [array for _, _, array in encoding.asked] == ARRAYS, "equal images are encoded once"
    [(request, frames)] = dispatched(encoding)
    cat, dog = map(embeddings, ARRAYS)
    assert (request.embedded, frames) == (True, [cat, dog, cat])
    asked = [each.image for _, each, _ in encoding.asked if each.image is not None]
    assert [each.sha256 for each in request.images] == [asked[place].sha256 for place in (0, 1, 0)]
    assert {(each.height, each.width) for each in asked} == {(2, 6)}
    assert {peer for peer, message in encoding.engine.sent if isinstance(message, TokenizedGenerateReqInput)} == {
        "scheduler-0"
    }
    await served.until_idle()


async def test_a_redispatch_encodes_nothing_again(served: Served, encoding: Encoding, http_of: HttpOf) -> None:
    encoding.up("encoder-0")
    engine = encoding.engine
    engine.auto = False
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT)))
    await until(lambda: len(engine.requests()) == 1)
    engine.scheduler_up("scheduler-1")
    engine.down("scheduler-0")
    await until(lambda: len(engine.requests()) == 2)
    for _ in range(5):
        engine.step()
    assert (await asking).status_code == 200
    (_, first), (_, again) = dispatched(encoding)
    assert first == again == [embeddings(ARRAYS[0])]
    assert len(encoding.asked) == 1


async def test_encoding_counts_in_the_time_to_the_first_token(
    served: Served, encoding: Encoding, http_of: HttpOf
) -> None:
    encoding.answers = False
    encoding.up("encoder-0")
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT)))
    await until(lambda: len(encoding.asked) == 1)
    await asyncio.sleep(0.3)
    encoding.answer()
    assert (await asking).status_code == 200
    metrics = (await http_of(served).get("/metrics")).text
    [seconds] = re.findall(r"^tercet_time_to_first_token_seconds_sum\S* (\S+)$", metrics, re.MULTILINE)
    assert float(seconds) >= 0.3


async def test_the_death_of_an_encoder_sends_its_images_elsewhere(
    served: Served, encoding: Encoding, http_of: HttpOf
) -> None:
    encoding.answers = False
    encoding.up("encoder-0")
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT)))
    await until(lambda: len(encoding.asked) == 1)
    encoding.engine.down("encoder-0")
    assert (await http_of(served).post("/v1/chat/completions", json=body())).status_code == 200, "text needs none"
    encoding.answers = True
    encoding.up("encoder-1")
    assert (await asking).status_code == 200
    assert [(peer, request.attempt) for peer, request, _ in encoding.asked] == [("encoder-0", 0), ("encoder-1", 1)]
    assert len({request.rid for _, request, _ in encoding.asked}) == 1


async def test_an_image_that_kills_encoders_ends_its_own_request(
    served: Served, encoding: Encoding, http_of: HttpOf
) -> None:
    encoding.answers = False
    encoding.up("encoder-0")
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT)))
    for death, dispatches in enumerate((1, 2, 4)):
        await until(lambda asked=dispatches: len(encoding.asked) == asked)  # type: ignore[misc]
        encoding.engine.down(f"encoder-{death}")
        encoding.up(f"encoder-{death + 1}")
    answer = await asking
    routes = [(request.attempt, request.exclusive, request.deferred) for _, request, _ in encoding.asked]
    assert routes == [(0, False, False), (1, False, False), (2, True, True), (3, True, False)]
    assert answer.status_code == 500
    assert "failed repeatedly" in answer.json()["error"]["message"]
    encoding.answers = True
    assert (await http_of(served).post("/v1/chat/completions", json=body(DOG))).status_code == 200


async def test_a_client_that_leaves_aborts_its_encodings(served: Served, encoding: Encoding, http_of: HttpOf) -> None:
    encoding.answers = False
    encoding.up("encoder-0")
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT, DOG)))
    await until(lambda: len(encoding.asked) == 2)
    asking.cancel()
    await served.until_idle()
    await until(lambda: sorted(encoding.aborts) == sorted(request.rid for _, request, _ in encoding.asked))
    assert encoding.engine.requests() == []
    encoding.answer()
    assert encoding.engine.requests() == []


async def test_a_user_s_abort_ends_a_request_that_waits_for_an_encoder(
    served: Served, encoding: Encoding, http_of: HttpOf
) -> None:
    asking = asyncio.ensure_future(
        http_of(served).post("/generate", json={"text": "<|endoftext|>", "image_data": CAT, "rid": "mine"})
    )
    await until(lambda: served.manager.waiting == 1)
    assert (await http_of(served).post("/abort_request", json={"rid": "mine"})).status_code == 200
    await asyncio.wait_for(asking, 5)
    await served.until_idle()


async def test_failures_of_encoders_are_told_to_the_client(served: Served, encoding: Encoding, http_of: HttpOf) -> None:
    encoding.up("encoder-0")
    encoding.finish = FinishReason(FinishType.ERROR, message="the model gave no finite numbers")
    answer = await http_of(served).post("/v1/chat/completions", json=body(CAT))
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the model gave no finite numbers")
    encoding.finish, encoding.refusal = None, "overloaded"
    assert (await http_of(served).post("/v1/chat/completions", json=body(CAT))).status_code == 503
    await served.until_idle()
    assert encoding.engine.requests() == []


@pytest.mark.parametrize("limit", [{"recovery_timeout": 0.2}, {"max_waiting": 0}])
async def test_an_image_without_an_encoder_gets_a_503_in_time(
    encoding: Encoding, http_of: HttpOf, limit: dict[str, Any]
) -> None:
    async with serving(encoding.engine, **limit) as served:
        answer = await http_of(served).post("/v1/chat/completions", json=body(CAT))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await http_of(served).post("/v1/chat/completions", json=body())).status_code == 200, "text needs none"
        await served.until_idle()
    assert encoding.engine.requests()[0].images == []


async def test_embeddings_of_another_size_are_dropped(served: Served, encoding: Encoding, http_of: HttpOf) -> None:
    encoding.answers = False
    encoding.up("encoder-0")
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT)))
    await until(lambda: len(encoding.asked) == 1)
    encoding.answer(size=20)
    assert encoding.engine.requests() == []
    encoding.answer()
    assert (await asking).status_code == 200


async def test_encoders_of_another_tower_and_whole_schedulers_get_nothing(
    served: Served, encoding: Encoding, http_of: HttpOf
) -> None:
    engine, form = encoding.engine, encoding.form
    encoding.form = msgspec.structs.replace(form, tower="another")
    encoding.up("other-0")
    encoding.form = form
    whole = msgspec.structs.replace(engine.limits, images=form.images, embeddings=None)
    ready = Ready(limits=whole, identity=ModelIdentity(weights=engine.weights))
    engine.schedulers.append("whole-0")
    engine._from("whole-0", PeerUp("whole-0", Role.SCHEDULER, "1"))
    engine._from("whole-0", PeerReady("whole-0", Role.SCHEDULER, ready))
    asking = asyncio.ensure_future(http_of(served).post("/v1/chat/completions", json=body(CAT)))
    await until(lambda: served.manager.waiting == 1)
    assert encoding.asked == []
    encoding.up("encoder-0")
    assert (await asking).status_code == 200
    assert {peer for peer, _, _ in encoding.asked} == {"encoder-0"}
    assert {peer for peer, message in engine.sent if message in engine.requests()} == {"scheduler-0"}


async def test_encoders_are_named_as_such(served: Served, encoding: Encoding, http_of: HttpOf) -> None:
    encoding.up("encoder-0")
    http = http_of(served)
    info = (await http.get("/server_info")).json()
    assert {each["peer"]: each["encoder"] for each in info["schedulers"]} == {"scheduler-0": False, "encoder-0": True}
    metrics = (await http.get("/metrics")).text
    assert 'tercet_parts_ready{frontend="frontend-0",role="encoder"} 1.0' in metrics
    assert 'tercet_parts_ready{frontend="frontend-0",role="scheduler"} 1.0' in metrics
    assert (await http.get("/model_info")).json()["has_image_understanding"] is True
    assert (await http.post("/v1/chat/completions", json={**body(), "model": "none"})).status_code == 404
