"""Where the inboxes of one machine's parts lie."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A private directory for inboxes, with a path short enough for them; removed at the end."""
    place = tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="tercet-", dir=place if len(place) <= 40 else "/tmp"))  # noqa: S108
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
