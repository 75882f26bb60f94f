"""Loader that checks new weights before the old ones are released, so that no step waits for the check."""

import logging
import sys
from collections.abc import Callable

from tercet.protocol.json_files import error_line
from tercet.scheduler.async_loader import AsyncLoader, ReadingThreads

logger = logging.getLogger(__name__)

_TIMEOUT = 600.0
"""Timeout in seconds for checking a checkpoint. It reads headers and tied tensors."""


def weights_loader(check: Callable[[str], None], timeout: float = _TIMEOUT) -> AsyncLoader[str, None]:
    """Return a loader whose keys are directories. Each request checks one again, because its files may change.

    `check` raises for a directory whose weights cannot be loaded, with any exception.
    """
    threads = ReadingThreads(1, "look at weights", timeout)
    return AsyncLoader(check, threads, most=sys.maxsize, reloads=lambda _: True, describe=_fault)


def _fault(error: BaseException) -> str:
    if isinstance(error, ValueError | OSError):
        return error_line(error)
    logger.warning("weights: check failed", exc_info=error)
    return f"its files cannot be read: {type(error).__name__}: {error_line(error)}"
