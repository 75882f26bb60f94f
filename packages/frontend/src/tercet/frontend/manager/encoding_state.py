"""Images and sounds of requests, while an encoder has them."""

from collections.abc import Sequence

from tercet.frontend.errors import RequestAbortedError, ServerError, from_rejection
from tercet.frontend.manager.inputs.images import PlacedImage
from tercet.frontend.manager.req_state import Verdict
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.request_state import RequestState, SingleWaiterEvent
from tercet.protocol.messages.audio import SoundInput
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.values import FinishReason, FinishType


class EncodingState(RequestState):
    """Image or sound of a request: one choice with one position, its embeddings."""

    def __init__(
        self,
        rid: str,
        placed: PlacedImage,
        form: EmbeddingForm,
        model: ServedModel,
        request: GenerateRequest,
        wake: SingleWaiterEvent,
    ) -> None:
        super().__init__(rid, model, b"", wake)
        self.embeddings: Frame | None = None
        self.frames = [placed.array]
        self.encodes = self._form = form
        self._place = placed.place
        self._request = request
        self.prompt_tokens = form.embeddings(placed.place)

    @property
    def has_text(self) -> bool:
        return False

    @property
    def content(self) -> bytes:
        return self._place.sha256

    @property
    def salt(self) -> str:
        return self._request.options.cache_salt

    @property
    def next_attempt(self) -> int:
        """Return the next attempt number. A rejected attempt never ran: its number is reused, so queue limits apply."""
        return self.attempt if self.refused else self.attempt + 1

    @property
    def open_indices(self) -> list[int]:
        return [] if self.done else [0]

    @property
    def done(self) -> bool:
        return self.error is not None or self.embeddings is not None

    @property
    def signature(self) -> bytes:
        return self._place.sha256

    def error_param(self, code: str, context: int) -> str | None:  # noqa: ARG002
        return None

    def position(self, index: int) -> int:  # noqa: ARG002
        return 0

    def accept(self, answer: EncodedMedia, frames: Sequence[memoryview]) -> Verdict:
        """Store the embeddings or the error that an encoder returned. Raises ValueError for a frame of another size."""
        if answer.attempt != self.attempt or self.done:
            return Verdict.STALE
        finish = answer.finish
        if finish is None:
            if [frame.nbytes for frame in frames] != [self._form.frame_bytes(self.prompt_tokens)]:
                raise ValueError("the embeddings do not fit the image or sound")
            self.embeddings, self.frames = frames[0], ()
        elif finish.type is FinishType.ABORT and not finish.user_requested:
            return Verdict.ABORTED
        else:
            self._end(finish)
        self._wake.set()
        return Verdict.ACCEPTED

    def _end(self, finish: FinishReason) -> None:
        message = finish.message or "The server ended this request."
        if finish.type is FinishType.ABORT:
            self.aborted, self.error = True, RequestAbortedError("The request was aborted.")
        else:
            self.error = from_rejection(finish.code, message, None) if finish.code else ServerError(message)

    def message(
        self,
        attempt: int,
        detokenizer: str,  # noqa: ARG002
        *,
        exclusive: bool = False,
        deferred: bool = False,
    ) -> EncodeMediaReq:
        place, options = self._place, self._request.options
        return EncodeMediaReq(
            rid=self.rid,
            attempt=attempt,
            image=place if isinstance(place, ImageInput) else None,
            sound=place if isinstance(place, SoundInput) else None,
            cache_salt=options.cache_salt,
            priority=options.priority,
            exclusive=exclusive,
            deferred=deferred,
            tenant=self._request.tenant,
        )
