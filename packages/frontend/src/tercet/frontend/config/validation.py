"""Checks of option values that several processes read: adapters, API keys, origins, parsers."""

from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

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


def check_keys(option: str, keys: Iterable[str]) -> None:
    """Raise ValueError, which names the option and never the key, for a key that no client can send in a header.

    An empty key is the worst of them: every client that sends no key would send it.
    """
    for key in keys:
        if not key:
            raise ValueError(
                f"{option} is given and empty: give a key, or for a server without keys leave out the option, "
                "its environment variable and its line in a configuration file"
            )
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"{option} must be printable ASCII without spaces")


def split_keys(_: object, text: str, *, delimiter: str | None = None) -> list[str]:
    """Return the keys that an environment variable holds: for a blank one an empty key, which `check_keys` refuses.

    A blank variable is a mistake, such as a secret that was not found. It must not start a server without keys.
    """
    return text.split(delimiter) or [""]


ApiKeys = Annotated[
    tuple[str, ...],
    Parameter(negative="", show_default=False, env_var="TERCET_API_KEYS", env_var_split=split_keys),
]
AdminKeys = Annotated[
    tuple[str, ...],
    Parameter(negative="", show_default=False, env_var="TERCET_ADMIN_KEYS", env_var_split=split_keys),
]


ANY = "*"


def check_origins(option: str, origins: Iterable[str]) -> None:
    """Raises ValueError for what no browser ever sends as an origin: it would let nobody in, and not say so."""
    for origin in origins:
        if origin != ANY and not _is_origin(origin):
            raise ValueError(f"{option} must be * or like https://chat.example.org:8443, not {origin!r}")


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False


AUTOMATIC = "auto"
"""What the chat template uses."""
NONE = "none"
_OTHER_FIELDS = frozenset({"role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations"})
"""What chat messages have besides reasoning."""


def check_notations(*, tools: str, reasoning: str, reasoning_field: str) -> None:
    """Raise ValueError, naming the option, for a notation that there is not and a field that cannot hold reasoning."""
    _check_format("--tool-call-parser", tools, TOOL_FORMATS)
    _check_format("--reasoning-parser", reasoning, REASONING_FORMATS)
    if not reasoning_field.isidentifier() or reasoning_field in _OTHER_FIELDS:
        raise ValueError(f"--reasoning-field-name cannot be {reasoning_field!r}")


def _check_format(option: str, name: str, known: Iterable[str]) -> None:
    choices = (AUTOMATIC, NONE, *known)
    if name not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, not {name!r}")
