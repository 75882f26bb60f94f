"""Files of the page: chat and live view at /, the API's documentation at /docs.

They hold nothing of the server, so they need no key; the page asks for one where the API needs it.
"""

import hashlib
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.errors import NotFoundError
from tercet.frontend.http.route import Route

FOLDER = Path(__file__).parent / "static"
DOCUMENTS = {"/": "index.html", "/docs": "docs.html"}
_PREFIX = "/page/"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _File(msgspec.Struct, frozen=True):
    """File of the page, as it is sent."""

    body: bytes
    headers: dict[str, str]


class PageFiles:
    """The files, each read at its first request."""

    def __init__(self) -> None:
        self._names = sorted(path.name for path in FOLDER.iterdir() if path.suffix in _MEDIA_TYPES)
        self._files: dict[str, _File] = {}

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route("GET", path, self.document) for path in DOCUMENTS),
            Route("GET", f"{_PREFIX}{{name}}", self.file),
        ]

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths that need no key."""
        return frozenset({*DOCUMENTS, *(f"{_PREFIX}{name}" for name in self._names)})

    async def document(self, request: Request) -> Response:
        return self._respond(request, DOCUMENTS[request.scope["path"]])

    async def file(self, request: Request) -> Response:
        """Return a script or style. Raises NotFoundError."""
        return self._respond(request, request.path_params["name"])

    def _respond(self, request: Request, name: str) -> Response:
        if name not in self._names:
            raise NotFoundError(f"The page has no file {name!r}.")
        file = self._files.get(name) or self._files.setdefault(name, _read(name))
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.headers["etag"] in known:
            return Response(status_code=304, headers=file.headers)
        return Response(file.body, headers=file.headers)


def _read(name: str) -> _File:
    body = (FOLDER / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, {**_HEADERS, "etag": etag, "content-type": _MEDIA_TYPES[Path(name).suffix]})
