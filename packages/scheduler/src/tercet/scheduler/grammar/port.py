"""Port of grammars: a backend compiles them, a matcher follows one output through one."""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tercet.protocol.messages.values import Grammar

Masks = npt.NDArray[np.int32]
"""[rows, ceil(vocab / 32)]: token t may come next if bit t % 32 of word t // 32 is set."""


class GrammarError(ValueError):
    """A grammar that the backend cannot read."""


class Matcher(Protocol):
    """State of one output in its grammar. Only one thread may use it at a time.

    No method raises for a token that does not fit or an exceeded limit: the matcher has an `error` from then on.
    """

    @property
    def error(self) -> str:
        """Error for a log; empty without one."""
        ...

    @property
    def accepting(self) -> bool:
        """Return whether the output so far is an instance of the grammar."""
        ...

    @property
    def finished(self) -> bool:
        """Return whether only an end token can follow. It may become known only when a mask is filled."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as the tokenizer would write them; does not append them."""
        ...

    def copy(self) -> Self:
        """Return another matcher in the same state."""
        ...


M = TypeVar("M", bound=Matcher)


class GrammarBackend(Protocol[M]):
    """Compiler of grammars for one tokenizer."""

    @property
    def name(self) -> str:
        """Name and version. An output can continue only on a scheduler with the same."""
        ...

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a text: allowed exactly where the grammar accepts."""
        ...

    def compile(self, grammar: Grammar) -> M:
        """Return a matcher at the beginning of an output. Thread-safe. Raises GrammarError."""
        ...

    def fill(self, matchers: Sequence[M], masks: Masks) -> None:
        """Write the mask of matcher i into row i; the row of one with an error is undefined.

        Releases the GIL meanwhile. All is computed in the calling thread, whose CPU time is therefore the cost.
        """
        ...
