"""Validation of option values that several processes read: adapters, API keys, origins, parsers."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from cyclopts import Parameter

from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

LONGEST_NAME = 256
LONGEST_PATH = 4096
MOST_ADAPTERS = 1024
"""Maximum for one model."""


def check_name(name: str) -> None:
    """Raise ValueError for an invalid adapter name."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or name != name.strip() or "=" in name:
        raise ValueError(f"an adapter's name has 1 to {LONGEST_NAME} printable characters, no = and no space around it")


def check_path(path: str) -> None:
    """Raise ValueError for an invalid path. Only schedulers can find out whether it exists."""
    if not path or len(path) > LONGEST_PATH or "\0" in path or not _is_unicode(path):
        raise ValueError(f"an adapter's path has 1 to {LONGEST_PATH} characters of Unicode")


def read_adapters(given: Iterable[str]) -> dict[str, str]:
    """Return paths by name from options NAME=PATH. Raises ValueError."""
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
    """Return whether the text has no surrogates, which stand for undecodable bytes of a command line."""
    return all(not 0xD800 <= ord(each) <= 0xDFFF for each in text)


def check_keys(option: str, keys: Iterable[str]) -> None:
    """Raise ValueError, naming the option and never the key, for a key that cannot be sent in a header.

    An empty key is the most dangerous: every client without a key would match it.
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
    """Split the keys in an environment variable; a blank one yields an empty key, which `check_keys` refuses.

    A blank variable is a mistake, such as a missing secret, and must not start a server without keys.
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
    """Raise ValueError for a value that no browser sends as an origin, which would silently match no page."""
    for origin in origins:
        if origin != ANY and not _is_origin(origin):
            raise ValueError(f"{option} must be * or like https://chat.example.org:8443, not {origin!r}")


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:
        return False


class MediaHost(NamedTuple):
    """Host that images are read from. Without a port, those of http and https."""

    name: str
    port: int | None = None


_HOST_NAME = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Host names in lower case. The last label begins with a letter, so no form of an address matches."""


def read_media_hosts(given: Iterable[str]) -> frozenset[MediaHost]:
    """Return the hosts of options HOST or HOST:PORT. Raises ValueError, also without the packages that reading needs.

    Addresses are refused, because a private one is never read, and a public one is better named.
    """
    hosts = set()
    for each in given:
        name, colon, port = each.lower().partition(":")
        if not _HOST_NAME.fullmatch(name) or len(name) > 253 or (colon and not _is_port(port)):
            raise ValueError(
                f"--allowed-media-host must be like images.example.org or images.example.org:8443, not {each!r}"
            )
        hosts.add(MediaHost(name, int(port) if colon else None))
    if hosts and not (_is_installed("httpcore2") and _is_installed("PIL")):
        raise ValueError("--allowed-media-host needs the extra tercet-frontend[media]")
    return frozenset(hosts)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text[:6]) <= 65535


def check_otlp_endpoint(url: str) -> None:
    """Raise ValueError for a URL that is not http(s), or without the packages that traces need."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"--otlp-endpoint must be like http://127.0.0.1:4318, not {url!r}")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        raise ValueError("--otlp-endpoint: OpenTelemetry is not installed: install the extra tercet-frontend[traces]")


def check_grpc_listen(address: str) -> None:
    """Raise ValueError for an address that is not HOST:PORT, or without the packages that gRPC needs."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--grpc-listen must be like 127.0.0.1:30001, not {address!r}")
    if not (_is_installed("grpc_health.v1") and _is_installed("grpc_reflection.v1alpha")):
        raise ValueError("--grpc-listen: gRPC is not installed: install the extra tercet-frontend[grpc]")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


AUTOMATIC = "auto"
"""Use the parser of the chat template."""
NONE = "none"
_OTHER_FIELDS = frozenset({"role", "content", "refusal", "tool_calls", "function_call", "audio", "annotations"})
"""Fields of chat messages besides reasoning."""


def check_notations(*, tools: str, reasoning: str, reasoning_field: str) -> None:
    """Raise ValueError, naming the option, for an unknown parser or an unusable reasoning field."""
    _check_format("--tool-call-parser", tools, TOOL_FORMATS)
    _check_format("--reasoning-parser", reasoning, REASONING_FORMATS)
    if not reasoning_field.isidentifier() or reasoning_field in _OTHER_FIELDS:
        raise ValueError(f"--reasoning-field-name cannot be {reasoning_field!r}")


def _check_format(option: str, name: str, known: Iterable[str]) -> None:
    choices = (AUTOMATIC, NONE, *known)
    if name not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, not {name!r}")
