"""Standard streams of a process: always open, and a failed write never ends the process."""

import contextlib
import faulthandler
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _LossyFile(io.FileIO):
    """File that accepts writes that fail, as on a full disk, and remembers the reason."""

    failure = ""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or lose, all of `data`."""
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size
        except OSError as error:
            self.failure = error.strerror or str(error)
            return size


def prepare_streams() -> None:
    """Open the standard streams that this process was started without, and make writes to stderr never fail.

    The next socket would get the number of a closed descriptor, and be closed or written to as that stream. A log that
    cannot be written, on a full disk or to a closed pipe, is no reason to end the process.
    """
    _open_descriptors()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # as long as it runs  # noqa: SIM115
    sys.stderr, _ = _lossy(sys.stderr)


def keep_output() -> None:
    """Make writes to stdout never fail from now on."""
    sys.stdout, _ = _lossy(sys.stdout)


@contextlib.contextmanager
def part_streams(program: str) -> Iterator[None]:
    """Provide standard streams for a process that writes only its help and its version to stdout.

    Exits with 1 if these could not be written, after a line on stderr. If a fault in native code ends the process, the
    stacks of its threads are written to stderr.
    """
    prepare_streams()
    faulthandler.enable(2)
    sys.stdout, file = _lossy(sys.stdout)
    status: str | int | None = None
    try:
        yield
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    if file is not None and file.failure and not status:
        sys.stderr.write(f"{program}: standard output: {file.failure}\n")
        status = 1
    sys.exit(status)


def give_up_output() -> None:
    """Discard the pending writes to stdout: the interpreter would retry them at exit, and exit with 120."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())


def _open_descriptors() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # descriptor 2, stderr, is the last standard stream
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _lossy(stream: TextIO) -> tuple[TextIO, _LossyFile | None]:
    """Return a stream that never fails, with its file; a stream without a file, as in a test, is returned as it is."""
    if type(stream) is not io.TextIOWrapper or not isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
        return stream, None
    raw = stream.buffer if isinstance(stream.buffer, io.FileIO) else stream.buffer.raw
    if isinstance(raw, _LossyFile) or type(raw) is not io.FileIO:
        return stream, raw if isinstance(raw, _LossyFile) else None
    file = _LossyFile(raw.fileno(), "w", closefd=False)
    writer = io.BufferedWriter(file)
    lossy = io.TextIOWrapper(writer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
    return lossy, file
