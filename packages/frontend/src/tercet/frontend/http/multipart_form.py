"""Bodies of type multipart/form-data, with a file: bounded in size and time, with errors in OpenAI's format."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from tercet.frontend.errors import (
    BadRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.memory_budget import MemoryBudget, Reservation
from tercet.frontend.http.request_body import BODY_SECONDS
from tercet.frontend.http.sse import ClientDisconnectedError

_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 65_536
_LIST = "[]"
"""End of the names of fields that are lists."""

Form = dict[str, str | bytes | list[str]]
"""Values by field: bytes of a file, and a list for the fields with names that end in `[]`."""


async def read_form(request: Request, limit: int) -> Form:
    """Return the fields of a body of at most `limit` bytes, which may have one file. It is never written to a disk.

    Raises ApiError or ClientDisconnectedError.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_long(limit)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise UnsupportedMediaTypeError("The body must be a form: send 'Content-Type: multipart/form-data'.")
    budget = request.app.state.body_budget
    assert isinstance(budget, MemoryBudget)
    try:
        with budget.reserve(caller_of(request).owner) as reservation:
            async with asyncio.timeout(BODY_SECONDS):
                return await _parse(request, limit, reservation)
    except TimeoutError:
        raise RequestTimeoutError(f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None


async def _parse(request: Request, limit: int, reservation: Reservation) -> Form:
    pieces = _bounded(request, limit, reservation)
    parser = MultiPartParser(
        request.headers, pieces, max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    parser.spool_max_size = limit + 1  # all of it stays in memory
    try:
        fields = await parser.parse()
    except MultiPartException as error:
        raise BadRequestError(f"The body is no form that can be read: {error.message}") from None
    try:
        return _values(fields)
    finally:
        await fields.close()


def _values(fields: FormData) -> Form:
    form: Form = {}
    for name, value in fields.multi_items():
        content = value.file.read() if isinstance(value, UploadFile) else value
        if name.endswith(_LIST) and isinstance(content, str):
            values = form.setdefault(name.removesuffix(_LIST), [])
            if isinstance(values, list):
                values.append(content)
        elif name in form:
            raise BadRequestError(f"The field {name!r} is there twice.", param=name)
        else:
            form[name] = content
    return form


async def _bounded(request: Request, limit: int, reservation: Reservation) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body. Each byte is in memory twice while the form is read: as a piece, and as its value."""
    length = 0
    async for piece in request.stream():
        length += len(piece)
        if length > limit:
            raise _too_long(limit)
        reservation.grow(2 * length)
        yield piece


def _too_long(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The body is longer than {limit} bytes.")
