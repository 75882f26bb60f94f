"""The text of API keys: how options, files and the environment give them."""

from collections.abc import Iterable
from typing import Annotated

from cyclopts import Parameter


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
