"""The exchange of tokens among ranks that hold different experts.

`AllToAllDispatcher` is the one adapter of the port. It sends each token once to each rank that has any of its experts,
and gets back one sum from each. Batches may be of any size, and empty: nothing is padded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

AllToAll = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""Sends rows [rows, bytes] uint8, so many to each rank, and returns the rows from all ranks, in their order. The
arguments are the rows, the number for each rank, and the number from each rank.
"""


class Dispatched(NamedTuple):
    """Tokens of all ranks that have experts on this rank."""

    x: torch.Tensor  # [rows, hidden]
    weights: torch.Tensor  # float32 [rows, top_k]
    places: torch.Tensor  # [rows, top_k]: the number of an expert on this rank; -1 for experts elsewhere
    loads: torch.Tensor  # int64 [ranks * width], on the CPU: (token, expert) pairs of each place, from all ranks
    handle: object
    """An argument of `combine`."""


class ExpertDispatcher(Protocol):
    """The port of an exchange. All ranks of the group call it in the same order; any may have no tokens."""

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, width: int) -> Dispatched:
        """Send tokens x [tokens, hidden] to their experts, at `places` [tokens, top_k] (see `Placement`).

        `weights` are float32 [tokens, top_k].
        """
        ...

    def combine(self, out: torch.Tensor, handle: object) -> torch.Tensor:
        """Send the outputs [rows, hidden] back, and return their sums [tokens, hidden]."""
        ...


@dataclass(frozen=True, eq=False)
class _Sent:
    """The tokens that a rank has sent: `tokens` are in the order of ranks, `sent` of them to each."""

    tokens: torch.Tensor
    count: int
    sent: list[int]
    received: list[int]


class AllToAllDispatcher:
    """The `ExpertDispatcher` over two all-to-alls, and an all-gather of the numbers of tokens.

    `ranks` are the numbers of the group's ranks among those that take part in the collectives.
    """

    def __init__(
        self,
        all_to_all: AllToAll,
        all_gather: Callable[[torch.Tensor], torch.Tensor],
        ranks: range,
        size: int,
        own: int,
    ) -> None:
        """Create the dispatcher of rank `ranks[own]` of `size`."""
        self._all_to_all = all_to_all
        self._all_gather = all_gather
        self._ranks = ranks
        self._size = size
        self._own = own

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, width: int) -> Dispatched:
        """See `ExpertDispatcher`."""
        count, ranks = len(x), len(self._ranks)
        target = places // width
        needed = torch.zeros(count, ranks, dtype=torch.bool, device=x.device).scatter_(1, target, value=True)
        to, tokens = needed.T.nonzero(as_tuple=True)
        numbers = torch.cat([needed.sum(0), places.flatten().bincount(minlength=ranks * width)])
        everyone = self._all_gather(numbers[None]).view(self._size, -1)[self._ranks.start :: self._ranks.step].cpu()
        sent, received = everyone[self._own, :ranks].tolist(), everyone[:, self._own].tolist()
        local = torch.where(target[tokens] == to[:, None], places[tokens] % width, -1)
        rows = _packed(x[tokens], weights[tokens], local.int())
        arrived = self._exchange(rows, sent, received)
        handle = _Sent(tokens, count, sent, received)
        inputs, given, here = _unpacked(arrived, x, weights)
        return Dispatched(inputs, given, here, everyone[:, ranks:].sum(0), handle)

    def combine(self, out: torch.Tensor, handle: object) -> torch.Tensor:
        """See `ExpertDispatcher`. Sums are in float32, in the order of ranks, and rounded once."""
        if not isinstance(handle, _Sent):
            raise TypeError("the handle is that of a dispatch")
        back = self._exchange(_bytes(out), handle.received, handle.sent).view(out.dtype)
        sums = torch.zeros(handle.count, out.shape[1], dtype=torch.float32, device=out.device)
        for tokens, rows in zip(torch.split(handle.tokens, handle.sent), torch.split(back, handle.sent), strict=True):
            sums[tokens] += rows  # a rank gets a token once
        return sums.to(out.dtype)

    def _exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return self._all_to_all(rows, self._spread(sent), self._spread(received))

    def _spread(self, numbers: Sequence[int]) -> list[int]:
        """Return a number for each rank of the collectives: 0 for those outside of the group."""
        spread = [0] * self._size
        for rank, number in zip(self._ranks, numbers, strict=True):
            spread[rank] = number
        return spread


def _packed(x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.cat([_bytes(places), _bytes(weights), _bytes(x)], 1)


def _unpacked(
    rows: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, weights and places, of the dtypes and widths of `x` and `weights`."""
    top_k = weights.shape[1]
    places, given, hidden = torch.split(rows, [4 * top_k, 4 * top_k, x.element_size() * x.shape[1]], 1)
    return _as(hidden, x.dtype), _as(given, torch.float32), _as(places, torch.int32)


def _as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.contiguous().view(dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
