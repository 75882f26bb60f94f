"""What the origin of a web page looks like, whoever names it: an option of this process or of `tercet serve`."""

from collections.abc import Iterable
from urllib.parse import urlsplit

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
