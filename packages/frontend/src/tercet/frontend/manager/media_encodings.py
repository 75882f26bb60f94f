"""Images and sounds of requests, placed in their prompts, and encoded where a model takes embeddings."""

from collections.abc import Sequence
from secrets import randbits

from msgspec import structs

from tercet.frontend.errors import BadRequestError
from tercet.frontend.manager.encoding_state import EncodingState
from tercet.frontend.manager.inputs.images import PlacedImage, placed_images
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.media.prompt_media import Decoded, form_of
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.request_state import SingleWaiterEvent
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm

MAX_EMBEDDING_BYTES = 1 << 30
"""Maximum bytes of the different embeddings of a request, which its frontend holds until it ends."""
_Key = tuple[bytes, str]
"""Hash and cache salt."""


async def placed_media(
    table: RequestTable,
    requests: Sequence[GenerateRequest],
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[Decoded]],
    model: ServedModel,
    rid: str,
) -> list[list[PlacedImage]]:
    """Return the images or sounds of each prompt of a request, with their arrays, or embeddings in their place.

    Raises ApiError. Encodings have ids of the form `rid.N`, so that an abort of the request ends them, too.
    """
    form = form_of(model.limits)
    every = zip(images, requests, prompts, strict=True)
    placed = [placed_images(shown, request.prompt, ids, form, model.limits.video) for shown, request, ids in every]
    if model.limits.embeddings is None or not any(placed):
        return placed
    encodings = Encodings(table, model, model.limits.embeddings)
    for own, request in zip(placed, requests, strict=True):
        for each in own:
            encodings.add(each, request, rid)
    try:
        found = await encodings.run()
    finally:
        encodings.release()
    keys = [[_key(each, request) for each in own] for own, request in zip(placed, requests, strict=True)]
    return [
        [structs.replace(each, array=found[key]) for each, key in zip(own, named, strict=True)]
        for own, named in zip(placed, keys, strict=True)
    ]


class Encodings:
    """The different images or sounds of a request, while encoders have them."""

    def __init__(self, table: RequestTable, model: ServedModel, form: EmbeddingForm) -> None:
        self._table = table
        self._model = model
        self._form = form
        self._wake = SingleWaiterEvent()
        self._states: dict[_Key, EncodingState] = {}
        self._bytes = 0

    def add(self, placed: PlacedImage, request: GenerateRequest, rid: str) -> None:
        """Add an image or sound. Raises ApiError if all of them together are too large."""
        key = _key(placed, request)
        if key in self._states:
            return
        self._bytes += self._form.frame_bytes(self._form.embeddings(placed.place))
        if self._bytes > MAX_EMBEDDING_BYTES:
            message = f"The embeddings of a request's images take more than {MAX_EMBEDDING_BYTES} bytes."
            raise BadRequestError(message, param=request.prompt.param, code="invalid_image")
        name = f"{rid}.{randbits(63)}"
        self._states[key] = EncodingState(name, placed, self._form, self._model, request, self._wake)

    async def run(self) -> dict[_Key, Frame]:
        """Dispatch all, and return their embeddings. Raises the ApiError of the first that fails."""
        for state in self._states.values():
            self._table.start(state)
        found: dict[_Key, Frame] = {}
        while len(found) < len(self._states):
            await self._wake.wait()
            for key, state in self._states.items():
                if state.error is not None:
                    raise state.error
                if state.embeddings is not None:
                    found[key] = state.embeddings
        return found

    def release(self) -> None:
        """Forget the encodings, and abort those that still run."""
        for state in self._states.values():
            if self._table.states.pop(state.rid, None) is not None:
                self._table.dispatcher.forget(state)


def _key(placed: PlacedImage, request: GenerateRequest) -> _Key:
    return placed.place.sha256, request.options.cache_salt
