"""Images in prompts: their keys in the prefix cache, and the chunks that keep them whole.

Every token of an image has the image's number as its key: a negative one, so that no token id equals it.
Equal images of a namespace have equal numbers, and different images never do.
"""

from array import array
from collections import OrderedDict

from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.plan import PlannedImage

_HASH_BYTES = 32
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

    def __init__(self, images: list[ImageInput], namespace: str, numbers: ImageNumbers, *, whole: bool) -> None:
        self.inputs = images
        self.planned = [
            PlannedImage(
                number=numbers.of(namespace, each.sha256),
                sha256=each.sha256,
                height=each.height,
                width=each.width,
                first=each.first,
                tokens=each.tokens,
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


def image_error(request: TokenizedGenerateReqInput, form: ImageFormat | None) -> str | None:
    """Return the fault in the images of a request, or None."""
    if not request.images:
        return None
    if form is None:
        return "this scheduler takes no images"
    ids = unpack_ints(request.input_ids)
    end = 0
    for each in request.images:
        before, end = end, each.first + each.tokens
        if len(each.sha256) != _HASH_BYTES or not before <= each.first < end <= len(ids):
            return "an image has no place in the prompt"
        if each.tokens > form.max_tokens or not form.fits(each.height, each.width):
            return "an image has a size that the model does not take"
        own = list(ids[each.first : end])
        if {own[0], own[-1]} != {form.token_id} or own.count(form.token_id) != form.embeddings(each.height, each.width):
            return "an image is not in the place of placeholder tokens"
    return None
