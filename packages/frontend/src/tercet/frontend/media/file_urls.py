"""Files at the URLs of requests: in base64 from a `data:` URL, or fetched."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from tercet.frontend.errors import BadRequestError


def file_at(
    url: str, noun: str, param: str, fetch: Callable[[], AbstractAsyncContextManager[bytes]] | None
) -> AbstractAsyncContextManager[str | bytes]:
    """Return the file at a URL, in base64 from a `data:` URL. `noun` is its name in errors. Raises ApiError.

    Without `fetch`, which reads http and https URLs, only `data:` URLs are read.
    """
    head, comma, data = url.partition(",")
    if head.startswith("data:"):
        if not comma or not head.endswith(";base64"):
            raise refused_file("its 'data:' URL has no ';base64,' before the data", noun, param)
        return nullcontext(data)
    if head.partition(":")[0].lower() in ("http", "https") and fetch is not None:
        return fetch()
    raise BadRequestError(
        f"{noun.capitalize()}s are read from 'data:' URLs only: send the {noun} itself, in base64. With "
        "--allowed-media-host HOST a server also reads http and https URLs of that host.",
        param=param,
        code=f"invalid_{noun}_url",
    )


def refused_file(why: str, noun: str, param: str) -> BadRequestError:
    """Return the error for a file that is refused."""
    return BadRequestError(f"The {noun} is refused: {why}.", param=param, code=f"invalid_{noun}")
