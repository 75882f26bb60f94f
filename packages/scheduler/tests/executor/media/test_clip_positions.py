"""Positions of clips in Qwen2-VL and Qwen2.5-VL: groups begin at one row and column, and at their times."""

from array import array

import numpy as np
import torch
from msgspec import structs

from tercet.protocol.messages.values import SamplingParams
from tercet.scheduler.core.images import PlannedImage
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.media.image_positions import ImagePositions
from tercet.scheduler.executor.slot_tables import Integers


def group(first: int, rows: int, columns: int, clip: int = -1, time: int = 0) -> PlannedImage:
    frames = 2 if clip >= 0 else 0
    return PlannedImage(
        number=-1,
        sha256=b"",
        height=4 * rows,
        width=4 * columns,
        first=first,
        tokens=rows * columns,
        frames=frames,
        clip=clip,
        time=time,
    )


def positions_of(*images: PlannedImage) -> tuple[Integers, int]:
    """Return the positions of a prompt to the end of its last image, and the shift of those after it."""
    positions = ImagePositions(None, 4, torch.device("cpu"))  # type: ignore[arg-type]
    tokens = array("i", range(200)).tobytes()
    init = SlotInit(slot=3, tokens=tokens, prompt_tokens=200, choice=0, sampling=SamplingParams(max_new_tokens=1))
    shift = positions.introduce(structs.replace(init, images=list(images)))
    return positions._slots[3], shift


def test_text_goes_on_after_the_largest_part_also_of_time() -> None:
    found, shift = positions_of(group(2, 1, 3, clip=2), group(5, 1, 3, clip=2, time=4), group(9, 2, 1))
    expected = [
        *[(0, 0, 0), (1, 1, 1)],
        *[(2, 2, 2), (2, 2, 3), (2, 2, 4)],
        *[(6, 2, 2), (6, 2, 3), (6, 2, 4)],
        (7, 7, 7),
        *[(8, 8, 8), (8, 9, 8)],
    ]
    np.testing.assert_array_equal(found.T, expected)
    assert shift == 10 - 11


def test_a_wide_clip_ends_after_its_columns() -> None:
    found, shift = positions_of(group(1, 1, 5, clip=1), group(6, 1, 5, clip=1, time=2))
    np.testing.assert_array_equal(found[:, [5, 10]].T, [(1, 1, 5), (3, 1, 5)])
    assert shift == 6 - 11


def test_clips_that_follow_each_other_are_apart() -> None:
    found, _ = positions_of(group(0, 1, 2, clip=0), group(2, 1, 2, clip=2))
    np.testing.assert_array_equal(found.T, [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)])
