"""What is done where there is no memory: what torch keeps is given back, and rows are computed in halves."""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

NO_MEMORY = torch.OutOfMemoryError, MemoryError
"""What an accelerator's allocator raises, and what native kernels do."""

Given = TypeVar("Given")


def release_cached() -> None:
    """Give memory that torch keeps back to the device, where it may become one piece."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def again(run: Callable[[], Given], release: Callable[[], None]) -> Given:
    """What `run` gives, if need be once memory was given back. Raises one of `NO_MEMORY` where that is not enough.

    What the first try computed is free when `release` is called: no error holds it any longer.
    """
    try:
        return run()
    except NO_MEMORY as error:
        logger.warning("no memory: what is kept for later is given back: %s", str(error))
    release()
    return run()


def in_parts(run: Callable[[slice], Given], first: int, last: int, release: Callable[[], None]) -> list[Given]:
    """What `run` gives of rows [first, last), in their order: at once, or in halves of halves where there is no memory.

    `run` may begin anew on rows that it did not finish. Raises one of `NO_MEMORY` where there is none for one row.
    """
    rows = last - first
    try:
        return [run(slice(first, last))]
    except NO_MEMORY as error:
        logger.warning("no memory for %d rows at once: %s", rows, str(error))
    release()
    if rows == 1:
        return [run(slice(first, last))]
    middle = first + rows // 2
    return [*in_parts(run, first, middle, release), *in_parts(run, middle, last, release)]
