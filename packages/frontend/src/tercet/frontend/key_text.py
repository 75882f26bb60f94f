"""What an API key may look like, whoever reads it: an option, a file, the environment."""

from collections.abc import Iterable


def check_keys(option: str, keys: Iterable[str]) -> None:
    """Raises ValueError, which names the option and never the key, for what no client could show in a header.

    An empty key is the worst of them: everybody who shows none would show it.
    """
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"{option} must be printable ASCII without spaces, and not empty")
