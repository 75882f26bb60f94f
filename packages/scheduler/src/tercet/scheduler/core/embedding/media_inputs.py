"""Images and sounds as inputs of an `EmbeddingScheduler`: each is encoded whole, in a step of its own."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.audio import SoundInput
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import Message
from tercet.protocol.messages.values import FinishReason, FinishType
from tercet.scheduler.core.embedding.inputs import Received
from tercet.scheduler.core.embedding.req import EmbeddingReq
from tercet.scheduler.core.embedding.validation import Fault
from tercet.scheduler.core.events import MediaReceived
from tercet.scheduler.core.intake.validation import INT32, LONGEST_NAME

MOST_ARRAY_BYTES = 4 << 30
"""Arrays of all held inputs; further ones are refused."""
MOST_EMBEDDING_BYTES = 256 << 20
"""Embeddings of inputs that were encoded or requested last."""
_HASH_BYTES = 32


class EncodeMediaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of one step: an image or a sound."""

    step: int
    media: ImageInput | SoundInput
    array: memoryview


class EncodeMediaResult(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings in the encoder's form, or the reason why there are none."""

    step: int
    embeddings: bytes = b""
    failure: str = ""


class MediaAnswers:
    """Collector of answers: a message for each input."""

    def __init__(self) -> None:
        self._collected: list[Outgoing] = []

    def send(self, peer: str, message: Message) -> None:
        self._collected.append((peer, message))

    def emit(self, req: EmbeddingReq, vector: bytes) -> None:
        """Add the embeddings of an input."""
        self._collected.append((req.frontend, _answer(req), vector))

    def fail(self, req: EmbeddingReq, finish: FinishReason) -> None:
        """Add a failed input."""
        self._collected.append((req.frontend, _answer(req, finish)))

    def collect(self) -> list[Outgoing]:
        """Return all collected messages."""
        return self._collected


def _answer(req: EmbeddingReq, finish: FinishReason | None = None) -> EncodedMedia:
    queue_time = None if math.isnan(req.waited) else req.waited
    return EncodedMedia(rid=req.rid, attempt=req.attempt, finish=finish, queue_time=queue_time)


class MediaInputs:
    """Inputs of a scheduler with the tower of a model alone. Their latest embeddings are kept, by hash and namespace.

    Equal hashes of two namespaces share nothing, so no tenant sees by time what another has sent.
    """

    kind = MediaReceived
    refusal = "this scheduler encodes images or sounds alone"
    most_rows = 1
    most_bytes = MOST_ARRAY_BYTES

    def __init__(self, form: EmbeddingForm, most_embedding_bytes: int = MOST_EMBEDDING_BYTES) -> None:
        self.form = form
        self._most = most_embedding_bytes
        self._kept: OrderedDict[tuple[bytes | str, ...], bytes] = OrderedDict()
        self._kept_bytes = 0

    def fault(self, message: Received) -> Fault | None:
        """Return why an array can have no embeddings here, or None."""
        assert isinstance(message, MediaReceived)
        request = message.request
        for name, given in (("rid", request.rid), ("tenant", request.tenant), ("cache_salt", request.cache_salt)):
            if len(given) > LONGEST_NAME:
                return "invalid_request", f"the {name} has {len(given)} characters; {LONGEST_NAME} are allowed"
        if not 0 <= request.attempt <= INT32 or not -INT32 - 1 <= request.priority <= INT32:
            return "invalid_request", "the attempt or the priority is out of range"
        media = request.media
        if media is None or len(media.sha256) != _HASH_BYTES:
            return "invalid_request", "there is no image or sound with a hash of 32 bytes"
        sizes = [frame.nbytes for frame in message.frames]
        if not self._embeddings(media) > 0 or sizes != [media.array_bytes]:
            return "invalid_request", "the array has a size that the model does not take"
        return None

    def req(self, message: Received, frontend: str, arrival: int, at: float) -> EmbeddingReq:
        assert isinstance(message, MediaReceived)
        request, array = message.request, next(iter(message.frames), memoryview(b""))
        media = request.media
        content = b"" if media is None else media.sha256, request.cache_salt
        count = 0 if media is None else self._embeddings(media)
        return EmbeddingReq(request, content, count, frontend, arrival, at, array)

    def known(self, req: EmbeddingReq) -> bytes | None:
        """Return the embeddings of an equal input that are kept, or None."""
        if req.content in self._kept:
            self._kept.move_to_end(req.content)
        return self._kept.get(req.content)

    def keep(self, req: EmbeddingReq, answer: bytes) -> bool:
        """Keep embeddings, in the place of those that were used first. Return True."""
        self._kept_bytes += len(answer) - len(self._kept.pop(req.content, b""))
        self._kept[req.content] = answer
        while self._kept_bytes > self._most:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1])
        return True

    def flush(self) -> str:
        """Drop all embeddings."""
        count = len(self._kept)
        self._kept.clear()
        self._kept_bytes = 0
        return f"{count} images or sounds forgotten"

    def plan(self, step: int, reqs: Sequence[EmbeddingReq]) -> EncodeMediaPlan:
        [req] = reqs
        request = req.request
        assert isinstance(request, EncodeMediaReq)
        assert request.media is not None
        return EncodeMediaPlan(step=step, media=request.media, array=req.array)

    def results(self, result: EncodeMediaResult, step: int, reqs: Sequence[EmbeddingReq]) -> list[bytes | FinishReason]:
        [req] = reqs
        size = 0 if result.failure else self.form.frame_bytes(req.tokens)
        if result.step != step or len(result.embeddings) != size:
            raise ValueError(f"result of step {result.step} does not answer plan {step}")
        return [FinishReason(FinishType.ERROR, message=result.failure) if result.failure else result.embeddings]

    def answers(self) -> MediaAnswers:
        return MediaAnswers()

    def _embeddings(self, media: ImageInput | SoundInput) -> int:
        """Return the number of embeddings; 0 for a size that the model does not take."""
        count = self.form.embeddings(media)
        if isinstance(media, SoundInput):
            return count
        form = self.form.video if media.frames else self.form.images
        return 0 if form is None or count > form.max_tokens else count
