"""Rotary positions in prompts with images, of models with M-RoPE (https://arxiv.org/abs/2409.12191).

A token of an image has a position of three parts: its time, its row and its column. Text after an image goes on from
the largest part, so positions of text are below the indices of its tokens. Groups of frames that follow each other
begin at the same row and column, and at their times.

A token rotates by one row of the rotary table, which kernels look up. The row of a position with different parts is
written behind those of the context length, for one step.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tercet.scheduler.core.plan import Row, SlotInit
from tercet.scheduler.executor.slot_tables import Integers, StepInputs
from tercet.scheduler.models.layers.layers import Rotary


class ImagePositions:
    """The positions of each slot's prompt, to the end of its last image."""

    def __init__(self, rotary: Rotary, patch: int, device: torch.device) -> None:
        """Create positions of images that have a token for each square of `patch` pixels."""
        self._rotary = rotary
        self._patch = patch
        self._device = device
        self._slots: dict[int, Integers] = {}  # [3, tokens]

    def introduce(self, init: SlotInit) -> int:
        """Note the images of a choice that takes a slot. Return the shift of all tokens after the last one."""
        self._slots.pop(init.slot, None)
        if not init.images:
            return 0
        runs: list[Integers] = []
        index = position = start = 0
        clip = -1
        for image in init.images:
            if image.clip < 0 or image.clip != clip:
                text = image.first - index
                runs.append(np.tile(np.arange(text) + position, (3, 1)))
                start = position = position + text
            clip = image.clip
            rows, columns = image.height // self._patch, image.width // self._patch
            parts = np.indices((1, rows, columns)).reshape(3, -1) + start
            parts[0] += image.time
            runs.append(parts)
            position = max(position, start + max(rows, columns, image.time + 1))
            index = image.first + image.tokens
        self._slots[init.slot] = np.concatenate(runs, axis=1)
        return position - index

    def begin(self, rows: Sequence[Row], inputs: StepInputs) -> StepInputs:
        """Return the inputs of a step with the positions of rows that begin before the end of an image."""
        places: list[Integers] = []
        positions: list[Integers] = []
        offset = 0
        for row in rows:
            known = self._slots.get(row.slot)
            if known is not None and row.start < known.shape[1]:
                part = known[:, row.start : row.start + row.count]
                places.append(offset + np.arange(part.shape[1]))
                positions.append(part)
            offset += row.count
        if not places:
            return inputs
        found = self._table_rows(np.concatenate(positions, axis=1))
        place = torch.from_numpy(np.concatenate(places)).to(self._device)
        return replace(inputs, positions=inputs.positions.index_copy(0, place, found), in_fixed_buffers=False)

    def _table_rows(self, positions: Integers) -> torch.Tensor:
        """Return the rows of the rotary table for positions [3, tokens], after writing those that are not in it."""
        rows = positions[0].copy()
        [differing] = np.nonzero((positions != positions[0]).any(0))
        if len(differing):
            self._rotary.write(torch.from_numpy(positions[:, differing].T.copy()).to(self._device))
            rows[differing] = self._rotary.spare + np.arange(len(differing))
        return torch.from_numpy(rows).to(self._device)
