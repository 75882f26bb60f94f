"""Images and sounds in prompts: their keys in the prefix cache, and the chunks that keep images whole.

Every token of an image has the image's number as its key: a negative one, so that no token id equals it.
Equal images of a namespace have equal numbers, and different images never do. All of this holds for sounds, too, and
for groups of frames: their positions depend on their time in the clip, so equal groups at other times are different.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import unpack_ints
from tercet.protocol.messages.video import VideoFormat

_HASH_BYTES = 32
Input = ImageInput | SoundInput
ALL_TOKENS = 2**31
"""More tokens than any choice has."""


class PlannedImage(msgspec.Struct, frozen=True, kw_only=True):
    """Image, group of frames or sound whose embeddings take the place of placeholder tokens among the `tokens` from
    `first` on.

    Equal images of one namespace have the same `number`. Height and width of a sound are 0.
    """

    number: int
    sha256: bytes
    height: int
    width: int
    first: int
    tokens: int
    original: tuple[int, ...] = ()
    """See `ImageInput`, as the fields that follow."""
    frames: int = 0
    clip: int = -1
    time: int = 0


class ImageNumbers:
    """Numbers of the `most` images that were used last.

    No number is used again, so an image that was forgotten misses the prefix cache and hits no other image.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._numbers: OrderedDict[tuple[str, bytes, int], int] = OrderedDict()
        self._last = 0

    def of(self, namespace: str, sha256: bytes, time: int = 0) -> int:
        """Return the number of an image, or of a group of frames at its time."""
        key = namespace, sha256, time
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
        self.planned = [_planned(each, namespace, numbers) for each in images]
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


def _planned(each: Input, namespace: str, numbers: ImageNumbers) -> PlannedImage:
    if isinstance(each, SoundInput):
        number = numbers.of(namespace, each.sha256)
        return PlannedImage(number=number, sha256=each.sha256, height=0, width=0, first=each.first, tokens=each.tokens)
    return PlannedImage(
        number=numbers.of(namespace, each.sha256, each.time),
        sha256=each.sha256,
        height=each.height,
        width=each.width,
        first=each.first,
        tokens=each.tokens,
        original=each.original,
        frames=each.frames,
        clip=each.clip,
        time=each.time,
    )


def inputs_of(request: TokenizedGenerateReqInput) -> list[Input]:
    """Return the images and the sounds of a request."""
    return [*request.images, *request.sounds]


def image_error(
    request: TokenizedGenerateReqInput,
    form: ImageFormat | None,
    sounds: SoundFormat | None = None,
    video: VideoFormat | None = None,
) -> str | None:
    """Return the fault in the images, the clips or the sounds of a request, or None."""
    if any(not each.frames for each in request.images) and form is None:
        return "this scheduler takes no images"
    if any(each.frames for each in request.images) and video is None:
        return "this scheduler takes no clips"
    if request.sounds and (sounds is None or request.images):
        return "this scheduler takes no sounds in prompts" if sounds is None else "a request has images and sounds"
    return _place_error(request, form, sounds, video) or clip_error(request.images)


def _place_error(
    request: TokenizedGenerateReqInput, form: ImageFormat | None, sounds: SoundFormat | None, video: VideoFormat | None
) -> str | None:
    ids = unpack_ints(request.input_ids)
    end = 0
    for each in inputs_of(request):
        noun = "a sound" if isinstance(each, SoundInput) else "a group of frames" if each.frames else "an image"
        own = sounds if isinstance(each, SoundInput) else video if each.frames else form
        before, end = end, each.first + each.tokens
        if len(each.sha256) != _HASH_BYTES or not before <= each.first < end <= len(ids):
            return f"{noun} has no place in the prompt"
        if own is None or each.tokens > own.max_tokens or (count := _embeddings(each, own)) is None:
            return f"{noun} has a size that the model does not take"
        tokens = list(ids[each.first : end])
        if {tokens[0], tokens[-1]} != {own.token_id} or tokens.count(own.token_id) != count:
            return f"{noun} is not in the place of placeholder tokens"
    return None


def _embeddings(each: Input, form: ImageFormat | SoundFormat | VideoFormat) -> int | None:
    """Return the number of embeddings of an input; None if it has a size that the model does not take."""
    if isinstance(each, SoundInput):
        return form.embeddings(each.samples) if isinstance(form, SoundFormat) and form.fits(each.samples) else None
    if isinstance(form, ImageFormat):
        size = each.height, each.width, each.original
        return form.embeddings(*size) if form.fits(*size) else None
    if isinstance(form, SoundFormat) or each.frames != form.frames or not form.fits(each.height, each.width):
        return None
    return form.embeddings(each.height, each.width)


def clip_error(images: Sequence[ImageInput]) -> str | None:
    """Return the fault in the places of groups whose positions depend on those before, or None.

    Positions are never beyond the index of their token, for which rotary tables have rows.
    """
    clip, end, time = -1, 0, 0
    for each in images:
        if each.clip < 0 or each.clip == each.first:
            if each.time:
                return "the first group of a clip has another time than 0"
        elif each.clip != clip or each.first != end or not time <= each.time <= each.first - each.clip:
            return "a group of frames does not follow the one before"
        clip, end, time = each.clip, each.first + each.tokens, each.time
    return None
