"""Backend that is created with the first grammar.

Most servers never get one, and the backend of a large vocabulary takes a second and 100 MB.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, M, Masks

logger = logging.getLogger(__name__)


class LazyBackend(Generic[M]):
    """Backend that calls `make` once, on first use. Thread-safe.

    If `make` raises ValueError, each grammar has that as its error.
    """

    def __init__(self, name: str, end_ids: Sequence[int], make: Callable[[], GrammarBackend[M]]) -> None:
        self.name = name
        self.end_ids = end_ids
        self._make = make
        self._made: GrammarBackend[M] | None = None
        self._fault = ""
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> M:
        """Return a matcher at the beginning of an output. Raises GrammarError."""
        return self._backend().compile(grammar)

    def fill(self, matchers: Sequence[M], masks: Masks) -> None:
        self._backend().fill(matchers, masks)

    def _backend(self) -> GrammarBackend[M]:
        with self._lock:
            if self._made is None and not self._fault:
                try:
                    self._made = self._make()
                except ValueError as error:
                    logger.error(
                        "grammar backend %s: tokenizer not supported, grammars are refused: error=%s", self.name, error
                    )
                    self._fault = f"this model's tokenizer cannot be used for grammars: {error}"
            if self._made is None:
                raise GrammarError(self._fault)
            return self._made
