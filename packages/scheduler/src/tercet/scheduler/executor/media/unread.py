"""Images, audio clips and texts that the rows of a slot cannot read yet."""

from collections.abc import Callable, Hashable
from typing import NamedTuple


class Unread(NamedTuple):
    """The first image, audio clip or text of a slot that rows may read and that is not encoded."""

    first: int
    """Place of its first token."""
    key: Hashable
    held: bool
    """Its frame is there. The frame of a choice that ended meanwhile may be gone."""
    encode: Callable[[], None]
    """Encodes it. Rows can read it from then on."""
