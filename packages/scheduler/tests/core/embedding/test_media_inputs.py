"""The core of a scheduler that only encodes: one image a step, and embeddings that are kept for equal ones."""

import hashlib
from typing import Any

import pytest

from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.media import ImageFormat, ImageInput, PixelRange
from tercet.protocol.messages.messages import (
    AbortReq,
    ControlReply,
    ExclusiveReady,
    FlushCacheReq,
    Message,
    Rejected,
)
from tercet.protocol.messages.values import FinishType
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan, EncodeMediaResult, MediaInputs
from tercet.scheduler.core.embedding.scheduler import EmbeddingScheduler
from tercet.scheduler.core.events import Arrival, CoreMessage, Drain, MediaReceived, PeerGone
from tercet.scheduler.testing import embedding_request, request

IMAGES = ImageFormat(
    size=PixelRange(min_pixels=4, max_pixels=64),
    patch=2,
    resample=2,
    marker="<image>",
    token="<image>",
    token_id=9,
    max_tokens=16,
)
SOUNDS = SoundFormat(rate=100, hop=2, samples=40, marker="<sound>", token="<sound>", token_id=9)
FORM = EmbeddingForm(width=4, dtype="bfloat16", tower="t", images=IMAGES)


def sound(samples: int) -> SoundInput:
    return SoundInput(sha256=bytes(32), samples=samples, first=0, tokens=0)


def received(
    number: int, rid: str = "", *, height: int = 2, width: int = 4, sha256: bytes = b"", **more: Any
) -> MediaReceived:
    """Return an image whose array is of one number, under its number or another rid."""
    array = bytes([number]) * (3 * height * width)
    sha256 = sha256 or hashlib.sha256(array).digest()
    image = ImageInput(sha256=sha256, height=height, width=width, first=0, tokens=0)
    given = {"attempt": 0, "image": image, **more}
    return MediaReceived(EncodeMediaReq(rid=rid or str(number), **given), (memoryview(array),))


class Run:
    """A core, an encoder whose embeddings are the first byte of an array, and what came out."""

    def __init__(self, form: EmbeddingForm = FORM, most: int = 1 << 20, **config: Any) -> None:
        config = {"policy": PolicyName.FAIR, **config}
        self.core = EmbeddingScheduler(CoreConfig(**config), MediaInputs(form, most))
        self.form = form
        self.encoded: list[int] = []
        self.embeddings: dict[tuple[str, str, int], bytes] = {}
        self.out: list[Message] = []

    def send(self, *messages: CoreMessage, source: str = "f0") -> None:
        self._take(self.core.handle(*(Arrival(source, message, 1.0) for message in messages)))

    def plan(self) -> EncodeMediaPlan | None:
        plan = self.core.schedule(3.0)
        if plan is not None:
            self.encoded.append(plan.array[0])
        return plan

    def commit(self, plan: EncodeMediaPlan, failure: str = "") -> None:
        media = plan.media
        count = media.height * media.width // 4 if isinstance(media, ImageInput) else SOUNDS.embeddings(media.samples)
        size = self.form.frame_bytes(count)
        made = b"" if failure else bytes([plan.array[0]]) * size
        self._take(self.core.commit(EncodeMediaResult(step=plan.step, embeddings=made, failure=failure)))

    def run(self) -> list[int]:
        """Step until nothing is left. Return the images that were encoded, in order."""
        first = len(self.encoded)
        while (plan := self.plan()) is not None:
            self.commit(plan)
        return self.encoded[first:]

    def _take(self, outgoing: list[Any]) -> None:
        for peer, message, *frames in outgoing:
            self.out.append(message)
            if isinstance(message, EncodedMedia) and message.finish is None:
                [frame] = frames
                assert (peer, message.rid, message.attempt) not in self.embeddings
                self.embeddings[peer, message.rid, message.attempt] = frame
            else:
                assert not frames


def test_each_image_has_a_step_and_its_embeddings() -> None:
    run = Run()
    run.send(received(1), received(2, height=4), received(3))
    assert run.core.load().queued_tokens == 2 + 4 + 2
    assert run.run() == [1, 2, 3]
    sizes = {rid: (frame[0], len(frame)) for (_, rid, _), frame in run.embeddings.items()}
    assert sizes == {"1": (1, 2 * 8), "2": (2, 4 * 8), "3": (3, 2 * 8)}
    assert [message.queue_time for message in run.out if isinstance(message, EncodedMedia)] == [2.0] * 3
    assert run.core.empty


def test_equal_images_of_a_namespace_are_encoded_once() -> None:
    run = Run()
    run.send(received(1, "a"), received(2, "b"), received(1, "c"), received(1, "d", cache_salt="other"))
    assert run.run() == [1, 2, 1], "another namespace learns nothing"
    assert len(run.embeddings) == 4
    run.send(received(1, "e"), received(1, "f", cache_salt="other"))
    assert run.plan() is None
    assert len(run.embeddings) == 6
    run.send(FlushCacheReq(id="c"))
    assert [each.message for each in run.out if isinstance(each, ControlReply)] == ["3 images or sounds forgotten"]
    run.send(received(1, "g"))
    assert run.run() == [1]


def test_embeddings_that_were_used_first_make_room() -> None:
    run = Run(most=2 * FORM.frame_bytes(2))
    run.send(received(1), received(2))
    run.run()
    run.send(received(1, "again"), received(3))
    assert run.run() == [3]
    run.send(received(1, "b"), received(2, "c"))
    assert run.run() == [2]
    run.send(received(4, height=8, width=8))
    assert run.run() == [4], "it is larger than all room, and answered all the same"
    assert run.embeddings["f0", "4", 0]


def test_tenants_take_turns() -> None:
    run = Run()
    run.send(*(received(number, tenant="many") for number in range(1, 6)), received(9, tenant="one"))
    assert run.run().index(9) <= 1


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("invalid_request", received(1, height=3)),
        ("invalid_request", received(1, height=0)),
        ("invalid_request", received(1, sound=sound(12))),
        ("invalid_request", received(1, image=None)),
        ("invalid_request", received(1, image=None, sound=sound(12))),
        ("invalid_request", received(1, height=2, width=40)),
        ("invalid_request", received(1, sha256=b"short")),
        ("invalid_request", received(1, attempt=-1)),
        ("invalid_request", received(1, tenant="t" * 600)),
        ("invalid_request", MediaReceived(received(1).request, ())),
        ("invalid_request", MediaReceived(received(1).request, (memoryview(b"\1" * 23),))),
        ("invalid_request", request("1", [1, 2])),
        ("invalid_request", embedding_request("1", [1, 2])),
    ],
)
def test_other_inputs_are_refused_with_a_reason(code: str, wrong: CoreMessage) -> None:
    run = Run()
    run.send(wrong)
    [refusal] = run.out
    assert isinstance(refusal, Rejected)
    assert (refusal.code, refusal.retry, refusal.rid) == (code, False, "1")
    assert run.core.empty


def test_sounds_have_embeddings_by_their_samples() -> None:
    run = Run(EmbeddingForm(width=4, dtype="float32", tower="t", sounds=SOUNDS))
    asked = EncodeMediaReq(rid="s", attempt=0, sound=sound(20))
    run.send(MediaReceived(asked, (memoryview(b"\5" * 40),)), received(1))
    assert [type(message) for message in run.out] == [Rejected], "this model hears and does not see"
    assert run.run() == [5]
    assert len(run.embeddings["f0", "s", 0]) == SOUNDS.embeddings(20) * 16


def test_the_queue_is_bounded_and_drains() -> None:
    run = Run(max_queued=1)
    run.send(received(1), received(2))
    run.send(Drain())
    run.send(received(3))
    refusals = [(each.rid, each.code, each.retry) for each in run.out if isinstance(each, Rejected)]
    assert refusals == [("2", "overloaded", True), ("3", "draining", True)]
    assert run.run() == [1]


def test_a_failed_image_ends_alone_and_is_not_kept() -> None:
    run = Run()
    run.send(received(1), received(2))
    plan = run.plan()
    assert plan is not None
    run.commit(plan, failure="no memory")
    [failed] = [message for message in run.out if isinstance(message, EncodedMedia)]
    assert failed.finish is not None
    assert (failed.finish.type, failed.finish.message) == (FinishType.ERROR, "no memory")
    run.send(received(1, "again"))
    assert sorted(run.run()) == [1, 2]


def test_attempts_aborts_and_lost_frontends_are_those_of_inputs_of_text() -> None:
    run = Run()
    run.send(received(1), received(2), received(3))
    run.send(received(4), source="f1")
    plan = run.plan()
    assert plan is not None
    run.send(received(1, attempt=1), AbortReq(rid="2"))
    run.send(PeerGone("f1"), source="f1")
    assert {frontend: held.rids for frontend, held in run.core.held().items()} == {"f0": ["1", "3"]}
    run.commit(plan)
    assert run.run() == [3]
    assert run.embeddings.keys() == {("f0", "1", 1), ("f0", "3", 0)}


def test_a_suspect_image_runs_alone_once_its_frontend_agrees() -> None:
    run = Run()
    run.send(received(1, attempt=2, exclusive=True, deferred=True))
    assert [type(each) for each in run.out] == [ExclusiveReady]
    assert run.plan() is None
    run.send(received(1, attempt=3, exclusive=True), received(2))
    assert run.run() == [1, 2]
