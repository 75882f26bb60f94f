"""Where a tokenizer puts its special tokens around an input, and between the two of a pair."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer


class Piece(NamedTuple):
    """Tokens that stand side by side, and the type of each."""

    ids: list[int]
    types: list[int]


class InputLayout(NamedTuple):
    """The post-processor's template, as found by looking at what it makes of a sample.

    An input is `before`, its own tokens, `after`; a pair is `before`, its first, `between`, its second, `after`.
    """

    before: Piece
    between: Piece
    after: Piece
    first_type: int
    second_type: int

    @property
    def added(self) -> int:
        """How many tokens come to the text's own."""
        return len(self.before.ids) + len(self.between.ids) + len(self.after.ids)

    def fill(self, first: Sequence[int], second: Sequence[int] = ()) -> Piece:
        """The whole input."""
        before, between, after = self.before, self.between, self.after
        ids = [*before.ids, *first, *between.ids, *second, *after.ids]
        types = [self.first_type] * len(first), [self.second_type] * len(second)
        return Piece(ids, [*before.types, *types[0], *between.types, *types[1], *after.types])


def layout_of(tokenizer: Tokenizer, *, pair: bool) -> InputLayout:
    """What `tokenizer` does. Templates are the same for every text, so one sample shows all there is."""
    encoding = tokenizer.encode("a", "a" if pair else None, add_special_tokens=True)
    pieces = Piece([], []), Piece([], []), Piece([], [])
    types = [0, 0]
    seen = 0
    for token_id, kind, sequence in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
        if sequence is None:
            place = seen if pair or seen == 0 else 2
            pieces[place].ids.append(token_id)
            pieces[place].types.append(kind)
        else:
            seen = sequence + 1
            types[sequence] = kind
    return InputLayout(*pieces, *types)
