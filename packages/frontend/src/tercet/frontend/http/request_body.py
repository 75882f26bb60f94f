"""JSON request bodies: bounded in size and time, standard JSON, with errors in OpenAI's format.

Of duplicate keys the last one counts, as in the parsers of Python, JavaScript and OpenAI. The time to parse a body
depends on the number of values more than on the number of bytes, so they are counted before.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec
import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from tercet.frontend.errors import (
    BadRequestError,
    FieldError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnknownParameterError,
    UnsupportedMediaTypeError,
)
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.long_strings import InvalidJsonError, parse_in_steps
from tercet.frontend.http.loop_turns import Steps, turns_of
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.http.parameter_path import joined, keys_of
from tercet.frontend.http.sse import ClientDisconnectedError, cancel_on_disconnect
from tercet.frontend.json_number import OVERLAP, may_have_long_numbers, parse_json

BODY_SECONDS = 60.0
"""Seconds in which a body must arrive, so that slow senders cannot hold connections."""

MAX_DEPTH = 128
MAX_VALUES = 65_536
"""Maximum number of objects, arrays and named values of a body. Parsing then takes about 15 ms."""
MAX_ITEMS = 524_288
"""Maximum number of commas outside strings, for example between token ids. Parsing then takes up to 35 ms."""
_LIGHT_STRUCTURAL = 2048
_LIGHT_BYTES = 262_144
"""Thresholds of a heavy body: above this number of structural characters, or of bytes, it is parsed in turns
(`LoopTurns`)."""
_LONG_BYTES = 1_048_576
"""Threshold of a body whose long strings are parsed by themselves. Shorter ones take up to 2 ms for their strings."""
PIECE = 65_536
"""Bytes that one step of the count scans."""
_CONTAINERS = frozenset({dict, list})
_MAX_ERRORS = 100
_MAX_TAG = 64
_Model = TypeVar("_Model", bound=BaseModel)
_Result = TypeVar("_Result")


async def read_model(request: Request, schema: type[_Model], limit: int, *, optional: bool = False) -> _Model:
    """Return the body as `schema`; with `optional`, no body stands for one without values.

    Raises ApiError that names the parameter at fault, or ClientDisconnectedError.
    """
    if optional and "transfer-encoding" not in request.headers and request.headers.get("content-length", "0") == "0":
        return schema()
    data, heavy = await _read(request, limit)
    if heavy:
        await _turn(request)  # lasts until the endpoint first awaits, and so covers its work
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise validation_error(error, data, schema) from None


async def read_json(request: Request, limit: int) -> object:
    """Return the parsed body of at most `limit` bytes. NaN and Infinity are invalid.

    Raises ApiError or ClientDisconnectedError.
    """
    data, _ = await _read(request, limit)
    return data


async def _read(request: Request, limit: int) -> tuple[object, bool]:
    """Return the parsed body, and whether it is heavy: work on a heavy body belongs in turns."""
    _check_headers(request, limit)
    body, structural = await _read_bytes(request, limit)
    heavy = structural > _LIGHT_STRUCTURAL or len(body) > _LIGHT_BYTES
    if structural > MAX_VALUES:
        await _check_cost(request, body)
    plain = heavy and await _has_plain_numbers(request, body)
    try:
        if len(body) > _LONG_BYTES:
            data = await _in_turns(request, parse_in_steps(body, plain=plain))
        else:
            if heavy:
                await _turn(request)
            data = parse_json(body, plain=plain)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"The body is not standard JSON (line {error.lineno}, column {error.colno}).") from None
    except InvalidJsonError as error:
        line, column = body.count(b"\n", 0, error.at) + 1, error.at - body.rfind(b"\n", 0, error.at)
        raise BadRequestError(f"The body is not standard JSON (line {line}, column {column}).") from None
    if structural > MAX_DEPTH:
        _check_depth(data)
    return data, heavy


def _check_headers(request: Request, limit: int) -> None:
    """Raise ApiError if the headers announce a body that is not JSON or that is too long."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError("The body must be JSON: send 'Content-Type: application/json'.")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaTypeError("The body must be sent as it is, without 'Content-Encoding'.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise PayloadTooLargeError(f"The body is longer than {limit} bytes.")


async def _read_bytes(request: Request, limit: int) -> tuple[bytearray, int]:
    """Return the bytes of a body and their `count_structural`. Raises ApiError or ClientDisconnectedError."""
    body, structural, budget = bytearray(), 0, request.app.state.body_budget
    assert isinstance(budget, MemoryBudget)
    try:
        with budget.reserve(caller_of(request).owner) as reservation:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise PayloadTooLargeError(f"The body is longer than {limit} bytes.")
                    reservation.read(piece)
                    structural += count_structural(piece)
    except TimeoutError:
        raise RequestTimeoutError(f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    return body, structural


async def _check_cost(request: Request, body: bytearray) -> None:
    """Raise BadRequestError for a body with too many values, which would take long to parse."""
    counter = StructureCounter()

    def count() -> Steps[None]:
        for start in range(0, len(body), PIECE):
            counter.feed(body[start : start + PIECE])
            if counter.counts.values > MAX_VALUES:
                raise BadRequestError(f"The body has more than {MAX_VALUES} values.")
            if counter.counts.items > MAX_ITEMS:
                raise BadRequestError(f"The body has more than {MAX_ITEMS} items in arrays and objects.")
            yield

    await _in_turns(request, count())


async def _has_plain_numbers(request: Request, body: bytearray) -> bool:
    """Return whether no number has so many digits that parsing must keep them, as found in turns."""

    def scan() -> Steps[bool]:
        for start in range(0, len(body), PIECE):
            first = min(start, OVERLAP)
            if may_have_long_numbers(body[start - first : start + PIECE], first):
                return False
            yield
        return True

    return await _in_turns(request, scan())


async def _in_turns(request: Request, steps: Steps[_Result]) -> _Result:
    """Return the result of `steps`, which end if the client leaves."""
    return await cancel_on_disconnect(request, turns_of(request).run(caller_of(request).owner, steps))


async def _turn(request: Request) -> None:
    await turns_of(request).turn(caller_of(request).owner)


def _check_depth(data: object) -> None:
    """Raise BadRequestError if more than MAX_DEPTH objects and arrays are nested, because later code recurses."""
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _values(each) if isinstance(inner, dict | list)]
        if not level:
            return
    raise BadRequestError(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _values(value: object) -> Iterable[object]:
    """Return the values of an object or an array; nothing for scalars and for flat arrays, such as millions of ids."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) and not _CONTAINERS.isdisjoint(map(type, value)) else ()


def validation_error(error: ValidationError, data: object, schema: type[BaseModel]) -> BadRequestError:
    """Return the error for the innermost fault, where a union came closest to a match, with its parameter.

    Among branches of a union at the same place, the one that accepts the type of the value came closest. A missing
    field says more than the unknown ones beside it.
    """
    if not isinstance(data, Mapping):
        return BadRequestError("The body must be a JSON object.", code="invalid_value")
    errors = error.errors(include_url=False, include_input=False)[:_MAX_ERRORS]
    found = [(_keys(each, schema), each) for each in errors]
    keys, closest = max(found, key=lambda pair: (len(pair[0]), _closeness(pair[1])))
    return _request_error(closest, joined(keys))


def _request_error(error: ErrorDetails, param: str | None) -> BadRequestError:
    """Return the error of a fault at `param`."""
    message = error["msg"].removeprefix("Value error, ")
    match error["type"]:
        case "value_error" if isinstance(fault := error["ctx"]["error"], FieldError):
            return fault.located(param)
        case "extra_forbidden":
            return UnknownParameterError(f"Unknown parameter: '{param}'.", param=param)
        case "missing" | "union_tag_not_found":
            return BadRequestError(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        case "union_tag_invalid":
            kinds, kind = error["ctx"]["expected_tags"], error["ctx"]["tag"][:_MAX_TAG]
            message = f"Input should be one of {kinds}, not '{kind}'"
    where = f" for '{param}'" if param else ""
    return BadRequestError(f"Invalid value{where}: {message}.", param=param, code="invalid_value")


def _keys(error: ErrorDetails, schema: type[BaseModel]) -> tuple[int | str, ...]:
    """Return the keys of a fault in the JSON. For an object of unknown type, this is its discriminator field."""
    keys = keys_of(schema, error["loc"])
    if error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        return (*keys, error["ctx"]["discriminator"].strip("'"))
    if error["type"] == "value_error" and isinstance(fault := error["ctx"]["error"], FieldError):
        return (*keys, *fault.keys)
    return keys


def _closeness(error: ErrorDetails) -> int:
    """Return how close to a match a branch of a union came that reports this error."""
    kind = error["type"]
    return 2 if kind == "missing" else 0 if kind.endswith("_type") else 1


class StructureCounts(msgspec.Struct):
    """Counts of the structural characters of a text, without those in strings."""

    values: int = 0
    """Opening brackets and colons: objects, arrays and members of objects."""
    items: int = 0
    """Commas: members of objects and arrays, except the first one of each."""


def count_structural(piece: bytes | bytearray) -> int:
    """Return the number of structural characters of a piece, including those in strings. Fast."""
    return sum(map(piece.count, (b"{", b"[", b":", b",")))


class StructureCounter:
    """Counter of the structural characters of a text that is fed piece by piece.

    If the text is invalid JSON, it counts at least the characters that a parser sees before it reports the error.
    """

    def __init__(self) -> None:
        self.counts = StructureCounts()
        self._in_string = False
        self._escapes = False
        """The last piece ended in the backslash of an escape."""

    def feed(self, piece: bytes | bytearray) -> None:
        if self._escapes:
            piece = piece[1:]
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escapes = piece.endswith(b"\\")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.counts.values += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        self.counts.items += outside.count(b",")
