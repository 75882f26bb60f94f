"""The JSON files among those of a model, and one error for whatever is wrong with a file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tercet.protocol.json_files import error_line, parse_json


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Run a block that reads a file nobody has checked. Raises ValueError, of one line, for whatever it raises."""
    try:
        yield
    except (MemoryError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except ValueError as error:
        raise ValueError(error_line(error)) from error
    except BaseException as error:  # tokenizers raises bare Exception, and what a panic in Rust becomes is none
        raise ValueError(f"{name} does not load: {error_line(error)}") from error


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a file; an empty one where there is no such file. Raises ValueError, naming the file."""
    try:
        value = parse_json(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as JSON: {error_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds no JSON object")
    return value


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """The text in a file. Raises ValueError, naming the file, for one that is not UTF-8."""
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: {error_line(error)}") from error
