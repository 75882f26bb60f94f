"""Inputs that wait for a step: those that come again after a crash first, then new ones."""

from collections.abc import Iterable, Iterator
from itertools import chain

from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.embedding_req import EmbeddingReq


class EmbeddingQueue:
    """In order of arrival, or under the policy `priority` by that; who was passed over too often goes first."""

    def __init__(self, policy: PolicyName, patience: int) -> None:
        self._by_priority = policy is PolicyName.PRIORITY
        self._patience = patience
        self._first: dict[EmbeddingReq, None] = {}
        self._rest: dict[EmbeddingReq, None] = {}

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    def __contains__(self, req: EmbeddingReq) -> bool:
        return req in self._first or req in self._rest

    def __iter__(self) -> Iterator[EmbeddingReq]:
        return chain(self._first, self._rest)

    def add(self, req: EmbeddingReq, *, first: bool = False) -> None:
        """Let an input wait."""
        (self._first if first else self._rest)[req] = None

    def remove(self, req: EmbeddingReq) -> None:
        """Take an input out, planned or aborted; harmless for one that does not wait."""
        self._first.pop(req, None)
        self._rest.pop(req, None)

    def in_order(self) -> Iterable[EmbeddingReq]:
        """Who should be planned next. Nothing may be removed while this is gone through."""
        if not self._by_priority:
            return self
        return chain(self._first, sorted(self._rest, key=self._rank))

    def count_passed_over(self, planned: list[EmbeddingReq]) -> None:
        """Age everyone whom a later arrival was preferred to."""
        if self._by_priority:
            latest = max(req.arrival for req in planned)
            for req in self._rest:
                req.passed_over += req.arrival < latest

    def _rank(self, req: EmbeddingReq) -> tuple[bool, int, int]:
        patient = req.passed_over < self._patience
        return patient, -req.priority if patient else 0, req.arrival
