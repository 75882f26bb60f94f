"""The port of grammars: a backend compiles them, a matcher follows one output through one."""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tercet.protocol.messages.values import Grammar

Masks = npt.NDArray[np.int32]
"""[rows, ceil(vocab / 32)]: token t may come next if bit t % 32 of word t // 32 is set."""


class GrammarError(ValueError):
    """A grammar that the backend does not read."""


class Matcher(Protocol):
    """Where one output stands in its grammar. It belongs to one thread at a time.

    Nothing here raises for a token that does not fit or a limit that is reached: the matcher has an `error` then, and
    keeps it.
    """

    @property
    def error(self) -> str:
        """What went wrong, for a log; empty while nothing did."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the output so far is an instance of the grammar."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow. It may be found out only as a mask is filled."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write them; does not append them."""
        ...

    def copy(self) -> Self:
        """Another matcher at the same place."""
        ...


M = TypeVar("M", bound=Matcher)


class GrammarBackend(Protocol[M]):
    """Reads grammars for one tokenizer."""

    @property
    def name(self) -> str:
        """Name and version: outputs can go on elsewhere only under the same."""
        ...

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a text: allowed where the grammar accepts, and nowhere else."""
        ...

    def compile(self, grammar: Grammar) -> M:
        """A matcher at the beginning of an output. Safe in any thread. Raises GrammarError."""
        ...

    def fill(self, matchers: Sequence[M], masks: Masks) -> None:
        """Write the mask of matcher i into row i, of one with an error anything. Other threads of Python run meanwhile.

        All is computed in the thread that calls, whose processor time is therefore what it costs.
        """
        ...
