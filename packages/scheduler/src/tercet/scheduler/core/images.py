"""Images and sounds in prompts: their keys in the prefix cache, and the chunks that keep images whole.

Every token of an image has the image's number as its key: a negative one, so that no token id equals it.
Equal images of a namespace have equal numbers, and different images never do. All of this holds for sounds, too.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.plan import PlannedImage

_HASH_BYTES = 32
Input = ImageInput | SoundInput
ALL_TOKENS = 2**31
"""More tokens than any choice has."""


class ImageNumbers:
    """Numbers of the `most` images that were used last.

    No number is used again, so an image that was forgotten misses the prefix cache and hits no other image.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._numbers: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._last = 0

    def of(self, namespace: str, sha256: bytes) -> int:
        """Return the number of an image."""
        key = namespace, sha256
        number = self._numbers.get(key)
        if number is None:
            self._last -= 1
            number = self._numbers[key] = self._last
            if len(self._numbers) > self._most:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(key)
        return number


class PromptImages:
    """Images of one prompt. With `whole`, their tokens see each other, so no chunk ends inside an image."""

    def __init__(self, images: Sequence[Input], namespace: str, numbers: ImageNumbers, *, whole: bool) -> None:
        self.inputs = list(images)
        self.planned = [
            PlannedImage(
                number=numbers.of(namespace, each.sha256),
                sha256=each.sha256,
                height=each.height if isinstance(each, ImageInput) else 0,
                width=each.width if isinstance(each, ImageInput) else 0,
                first=each.first,
                tokens=each.tokens,
                original=each.original if isinstance(each, ImageInput) else (),
            )
            for each in images
        ]
        self._ids: list[array[int]] = []
        self._whole = whole

    def write_keys(self, tokens: "array[int]") -> None:
        """Replace the tokens of images in a prompt by the keys of the images."""
        for each in self.planned:
            place = slice(each.first, each.first + each.tokens)
            self._ids.append(tokens[place])
            tokens[place] = array("i", [each.number] * each.tokens)

    def with_ids(self, tokens: "array[int]") -> "array[int]":
        """Return a copy of a prompt, and what follows it, with its own tokens in the place of keys."""
        ids = tokens[:]
        for each, own in zip(self.inputs, self._ids, strict=True):
            ids[each.first : each.first + each.tokens] = own
        return ids

    def readable(self, computed: int) -> int:
        """Return the first token of the first image that is not computed whole; `ALL_TOKENS` if all are."""
        return next((each.first for each in self.inputs if each.first + each.tokens > computed), ALL_TOKENS)

    def chunk(self, start: int, count: int) -> int:
        """Return the number of tokens of a chunk of about `count` tokens from `start` on that cuts no image.

        It is larger than `count` if the chunk begins with an image.
        """
        end = start + count
        for each in self.inputs if self._whole and count > 0 else ():
            after = each.first + each.tokens
            if each.first < end < after:
                return (each.first if start < each.first else after) - start
        return count


def inputs_of(request: TokenizedGenerateReqInput) -> list[Input]:
    """Return the images and the sounds of a request."""
    return [*request.images, *request.sounds]


def image_error(
    request: TokenizedGenerateReqInput, form: ImageFormat | None, sounds: SoundFormat | None = None
) -> str | None:
    """Return the fault in the images or the sounds of a request, or None."""
    if request.images and form is None:
        return "this scheduler takes no images"
    if request.sounds and (sounds is None or request.images):
        return "this scheduler takes no sounds in prompts" if sounds is None else "a request has images and sounds"
    if request.images and form is not None:
        return _place_error(request, request.images, form)
    return _place_error(request, request.sounds, sounds) if sounds is not None else None


def _place_error(
    request: TokenizedGenerateReqInput, inputs: Sequence[Input], form: ImageFormat | SoundFormat
) -> str | None:
    ids = unpack_ints(request.input_ids)
    noun = "an image" if isinstance(form, ImageFormat) else "a sound"
    end = 0
    for each in inputs:
        before, end = end, each.first + each.tokens
        if len(each.sha256) != _HASH_BYTES or not before <= each.first < end <= len(ids):
            return f"{noun} has no place in the prompt"
        if each.tokens > form.max_tokens or (count := _embeddings(each, form)) is None:
            return f"{noun} has a size that the model does not take"
        own = list(ids[each.first : end])
        if {own[0], own[-1]} != {form.token_id} or own.count(form.token_id) != count:
            return f"{noun} is not in the place of placeholder tokens"
    return None


def _embeddings(each: Input, form: ImageFormat | SoundFormat) -> int | None:
    """Return the number of embeddings of an input; None if it has a size that the model does not take."""
    if isinstance(each, ImageInput) and isinstance(form, ImageFormat):
        size = each.height, each.width, each.original
        return form.embeddings(*size) if form.fits(*size) else None
    if isinstance(each, SoundInput) and isinstance(form, SoundFormat):
        return form.embeddings(each.samples) if form.fits(each.samples) else None
    return None
