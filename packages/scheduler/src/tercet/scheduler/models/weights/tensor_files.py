"""Access to safetensors files with one error type for all faults."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tercet.scheduler.model_files import reading


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file whose header was read, like `safe_open`: its tensors are views of the mapped file.

    Raise ModelError for a file that the library refuses for any reason.
    """
    with ExitStack() as stack:
        with reading(str(path)):
            file = stack.enter_context(safe_open(path, framework="pt"))
        yield file
