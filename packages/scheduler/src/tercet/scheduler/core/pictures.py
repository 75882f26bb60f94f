"""Pictures in prompts: their keys in the prefix cache, and the chunks that keep them whole.

Every placeholder token of a picture has the picture's number as its key: a negative one, so that no token id equals it.
Equal pictures of a namespace have equal numbers, and different pictures never do.
"""

from array import array
from collections import OrderedDict

from tercet.protocol.messages.media import PictureFormat, PictureInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.plan import PlannedPicture

_HASH_BYTES = 32


class PictureNumbers:
    """Numbers of the `most` pictures that were used last.

    No number is used again, so a picture that was forgotten misses the prefix cache and hits no other picture.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._numbers: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._last = 0

    def of(self, namespace: str, sha256: bytes) -> int:
        """Return the number of a picture."""
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


class PromptPictures:
    """Pictures of one prompt. With `whole`, their tokens see each other, so no chunk ends inside a picture."""

    def __init__(
        self, pictures: list[PictureInput], token_id: int, namespace: str, numbers: PictureNumbers, *, whole: bool
    ) -> None:
        self.inputs = pictures
        self.planned = [
            PlannedPicture(
                number=numbers.of(namespace, each.sha256), sha256=each.sha256, first=each.first, tokens=each.tokens
            )
            for each in pictures
        ]
        self._token_id = token_id
        self._whole = whole

    def write_keys(self, tokens: "array[int]") -> None:
        """Replace the placeholder tokens of a prompt by the keys of their pictures."""
        for each in self.planned:
            tokens[each.first : each.first + each.tokens] = array("i", [each.number] * each.tokens)

    def with_ids(self, tokens: "array[int]") -> "array[int]":
        """Return a copy of a prompt, and what follows it, with placeholder tokens in the place of keys."""
        ids = tokens[:]
        for each in self.inputs:
            ids[each.first : each.first + each.tokens] = array("i", [self._token_id] * each.tokens)
        return ids

    def chunk(self, start: int, count: int) -> int:
        """Return the number of tokens of a chunk of about `count` tokens from `start` on that cuts no picture.

        It is larger than `count` if the chunk begins with a picture.
        """
        end = start + count
        for each in self.inputs if self._whole and count > 0 else ():
            after = each.first + each.tokens
            if each.first < end < after:
                return (each.first if start < each.first else after) - start
        return count


def picture_error(request: TokenizedGenerateReqInput, form: PictureFormat | None) -> str | None:
    """Return the fault in the pictures of a request, or None."""
    if not request.pictures:
        return None
    if form is None:
        return "this scheduler takes no pictures"
    ids = unpack_ints(request.input_ids)
    end = 0
    for each in request.pictures:
        first, end, before = each.first, each.first + form.tokens, end
        if (
            len(each.sha256) != _HASH_BYTES
            or each.tokens != form.tokens
            or not before <= first <= len(ids) - each.tokens
        ):
            return "a picture has no place in the prompt"
        if any(token != form.token_id for token in ids[first:end]):
            return "a picture is not in the place of placeholder tokens"
    return None
