"""Counts of each slot's tokens, for slots with penalties."""

from collections.abc import Sequence

import numpy as np
import torch

from tercet.kernels.ops.penalties import TokenCounts
from tercet.scheduler.device.staging import HostToDevice


class PenaltyCounts:
    """Counts of output tokens, and flags of prompt tokens, for slots with penalties.

    A slot has one row of a table that doubles when it is full: 5 bytes per slot and vocabulary entry.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._to_device = HostToDevice(device)
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def table(self) -> TokenCounts:
        """The counts of all slots; `rows` has their indices."""
        return TokenCounts(self._output, self._prompt)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Return the table rows of slots, all of which have counts."""
        return [self._row_of[slot] for slot in slots]

    def drop(self, slot: int) -> None:
        """Drop the counts of a slot, if any."""
        if slot in self._row_of:
            self._free.append(self._row_of.pop(slot))

    def introduce(self, slot: int, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Count the known tokens of a choice that has no counts. If this raises, it still has none."""
        if not self._free:
            self._grow()
        row = self._free[-1]
        [known] = self._to_device.send([np.array(tokens, dtype=np.int64)])
        prompt, output = known[:prompt_tokens], known[prompt_tokens:]
        self._output[row] = 0
        self._output[row].index_put_((output,), torch.ones_like(output, dtype=torch.int32), accumulate=True)
        self._prompt[row] = False
        self._prompt[row].index_fill_(0, prompt, True)
        self._row_of[slot] = self._free.pop()

    def add(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one more token in each of the rows, which may repeat; -1 counts nothing."""
        self._output.index_put_((rows, tokens.clamp(min=0)), (tokens >= 0).int(), accumulate=True)

    def _grow(self) -> None:
        old, vocab_size = self._output.shape
        size = max(4, 2 * old)
        output = torch.cat([self._output, self._output.new_zeros(size - old, vocab_size)])
        prompt = torch.cat([self._prompt, self._prompt.new_zeros(size - old, vocab_size)])
        self._output, self._prompt = output, prompt  # both or neither, if memory is short
        self._free += range(old, size)
