"""Opening safetensors files: the library's own check of a header, and one error for all that is wrong with it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tercet.scheduler.model_files import reading


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file whose header was read, as `safe_open` does: its tensors are views of the mapped file.

    Raises ModelError for a file that the library refuses, for whatever reason.
    """
    with ExitStack() as stack:
        with reading(str(path)):
            file = stack.enter_context(safe_open(path, framework="pt"))
        yield file
