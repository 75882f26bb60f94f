"""Readers of a model's files that report every failure as a one-line ValueError."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from json import JSONDecodeError

from tercet.protocol.json_files import error_line


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert any error of the block, which parses an unchecked file, to a ValueError of one line."""
    try:
        yield
    except (MemoryError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except JSONDecodeError as error:
        raise ValueError(f"{name} cannot be read as JSON: {error_line(error)}") from error
    except ValueError as error:
        raise ValueError(error_line(error)) from error
    except BaseException as error:  # tokenizers raises bare Exception, and a Rust panic is a BaseException
        raise ValueError(f"{name} does not load: {error_line(error)}") from error


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """Return the text of a file. Raises ValueError with the file's name if it is not UTF-8."""
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error_line(error)}") from error
