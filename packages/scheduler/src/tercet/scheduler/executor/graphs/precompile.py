"""Compilation of a model's kernels before its first step, by several processes at a time.

Steps are recorded on the GPU: torch's operations run, and no Triton kernel does. Kernels that this machine has compiled
before are in Triton's cache on disk and are left out.
"""

import logging
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch

from tercet.scheduler.core.plan import Plan
from tercet.scheduler.executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_MOST_WORKERS = 8
"""Worker processes, each of which holds torch in memory."""
_FEWEST = 4
"""Kernels for which workers are started; fewer are compiled by their first launch."""
_INTERVAL = 5.0
"""Seconds between log lines."""


def precompile(runner: Callable[[], ModelRunner], plans: Iterable[Plan], cores: int) -> None:
    """Compile the kernels of some steps. What fails is logged, and then compiled by the first step that launches it."""
    if find_spec("triton") is None:
        return
    from tercet.kernels.triton.precompile import compile_all, missing, recorded

    began = time.monotonic()
    try:
        with recorded() as kernels:
            model_runner = runner()
            for plan in plans:
                model_runner.execute(plan).result()
    except torch.AcceleratorError:  # the device has failed
        raise
    except Exception:
        logger.warning("kernels could not be recorded, each is compiled by its first launch", exc_info=True)
        return
    if len(wanted := missing(kernels)) < _FEWEST:
        return
    workers = max(1, min(_MOST_WORKERS, cores, len(wanted)))
    logger.info("compiling kernels: kernels=%d workers=%d", len(wanted), workers)
    failures = compile_all(wanted, workers, _reporter())
    for failure in failures:
        logger.warning("a kernel is compiled by its first launch: %s", failure)
    seconds = time.monotonic() - began
    logger.info("compiled kernels: kernels=%d failed=%d seconds=%.1f", len(wanted), len(failures), seconds)


def _reporter() -> Callable[[int, int], None]:
    """Return a function that logs progress at most every `_INTERVAL` seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _INTERVAL and done < total:
            last = now
            logger.info("compiling kernels: done=%d of=%d", done, total)

    return report
