"""Layout of special tokens around an input and between the texts of a pair."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer


class Piece(NamedTuple):
    """Tokens and their type ids."""

    ids: list[int]
    types: list[int]


class InputLayout(NamedTuple):
    """Template of the tokenizer's post-processor, inferred from its output for a sample.

    An input is `before`, its own tokens, `after`; a pair is `before`, its first, `between`, its second, `after`.
    """

    before: Piece
    between: Piece
    after: Piece
    first_type: int
    second_type: int

    @property
    def added(self) -> int:
        """Return the number of special tokens."""
        return len(self.before.ids) + len(self.between.ids) + len(self.after.ids)

    def fill(self, first: Sequence[int], second: Sequence[int] = ()) -> Piece:
        """Build the whole input."""
        before, between, after = self.before, self.between, self.after
        ids = [*before.ids, *first, *between.ids, *second, *after.ids]
        types = [self.first_type] * len(first), [self.second_type] * len(second)
        return Piece(ids, [*before.types, *types[0], *between.types, *types[1], *after.types])


def layout_of(tokenizer: Tokenizer, *, pair: bool) -> InputLayout:
    """Infer the layout from a sample; templates do not depend on the text."""
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
