"""Standard streams of a process: always open, and never the reason that it ends."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _PatientFile(io.FileIO):
    """A file that takes what cannot be written, as on a full disk, and remembers why."""

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
    """Open the standard streams that this process was started without, and let no failed write to stderr be an error.

    A closed descriptor would be the number of the next socket, and be closed or written to as the stream that it was.
    A log that cannot be written, on a full disk or to a reader that is gone, is no reason to end what others rely on.
    """
    _open_descriptors()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # as long as it runs
    sys.stderr, _ = _patient(sys.stderr)


def keep_output() -> None:
    """Let no failed write to stdout be an error from now on."""
    sys.stdout, _ = _patient(sys.stdout)


@contextlib.contextmanager
def part_streams(program: str) -> Iterator[None]:
    """Standard streams for a part, which writes to stdout no more than its help and its version.

    Exits with 1 where that could not be written, after a line that says so.
    """
    prepare_streams()
    sys.stdout, file = _patient(sys.stdout)
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
    """Forget what is left to write to stdout: the interpreter would try again at its end, and exit with 120."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())


def _open_descriptors() -> None:
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # stderr is the last of them
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _patient(stream: TextIO) -> tuple[TextIO, _PatientFile | None]:
    """The stream as one that never fails, and its file; a stream that is no file, as in a test, stays as it is."""
    if type(stream) is not io.TextIOWrapper or not isinstance(stream.buffer, io.BufferedWriter | io.FileIO):
        return stream, None
    raw = stream.buffer if isinstance(stream.buffer, io.FileIO) else stream.buffer.raw
    if isinstance(raw, _PatientFile) or type(raw) is not io.FileIO:
        return stream, raw if isinstance(raw, _PatientFile) else None
    file = _PatientFile(raw.fileno(), "w", closefd=False)
    writer = io.BufferedWriter(file)
    patient = io.TextIOWrapper(writer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
    return patient, file
