"""What the name and the path of an adapter may look like."""

from collections.abc import Iterable

LONGEST_NAME = 256
LONGEST_PATH = 4096
MOST_ADAPTERS = 1024
"""Of one model."""


def check_name(name: str) -> None:
    """Raise ValueError for a name that could not be told or asked for."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or name != name.strip() or "=" in name:
        raise ValueError(f"an adapter's name has 1 to {LONGEST_NAME} printable characters, no = and no space around it")


def check_path(path: str) -> None:
    """Raise ValueError for what is no path on any machine. Whether there is anything a scheduler finds out."""
    if not path or len(path) > LONGEST_PATH or "\0" in path or not _is_unicode(path):
        raise ValueError(f"an adapter's path has 1 to {LONGEST_PATH} characters of Unicode")


def read_adapters(given: Iterable[str]) -> dict[str, str]:
    """Paths by name, of options that say NAME=PATH. Raises ValueError."""
    paths: dict[str, str] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals:
            raise ValueError(f"--lora wants NAME=PATH, not {each!r}")
        try:
            check_name(name)
            check_path(path)
        except ValueError as error:
            raise ValueError(f"--lora {each!r}: {error}") from None
        if name in paths:
            raise ValueError(f"--lora {name!r} is given twice")
        paths[name] = path
    if len(paths) > MOST_ADAPTERS:
        raise ValueError(f"--lora can be given {MOST_ADAPTERS} times")
    return paths


def _is_unicode(text: str) -> bool:
    """Not so are file names that a command line could not decode."""
    return all(not 0xD800 <= ord(each) <= 0xDFFF for each in text)
