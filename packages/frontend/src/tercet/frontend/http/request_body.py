"""Reading a request's JSON: bounded, standard, and refused in OpenAI's words when it is not what the endpoint takes.

Duplicate keys: the last one counts, as in Python's, JavaScript's and OpenAI's own parsers.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from tercet.frontend.errors import (
    BadRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnknownParameterError,
    UnsupportedMediaTypeError,
)
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.json_cost import PIECE, ShapeCounter, most_marks
from tercet.frontend.http.loop_turns import LoopTurns, Steps
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.http.sse import ClientGoneError, unless_gone

BODY_SECONDS = 60.0
"""Time a body has to arrive in, so that slow senders hold no connection for ever."""

MAX_DEPTH = 128
MAX_VALUES = 131_072
"""Objects, arrays and named values that a body may have, so that it is parsed and validated in some 20 ms."""
MAX_ITEMS = 1_048_576
"""Commas that it may have outside texts: the numbers of its prompts, for example."""
_LIGHT_MARKS = 2048
_LIGHT_BYTES = 262_144
"""A body with more brackets, colons and commas, or of more bytes, is read in turns (`LoopTurns`)."""
_HOLDERS = frozenset({dict, list})
_ERRORS_READ = 100
_TAG_SHOWN = 64
_Model = TypeVar("_Model", bound=BaseModel)


async def read_model(request: Request, schema: type[_Model], limit: int) -> _Model:
    """Return the body as `schema`. Raises ApiError naming the parameter at fault, and ClientGoneError."""
    data, heavy = await _read(request, limit)
    if heavy:
        await _turn(request)  # which lasts until the endpoint first waits: its work on the model belongs to it
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise refusal(error, data) from None


async def read_json(request: Request, limit: int) -> object:
    """Return the body, of at most `limit` bytes, parsed. NaN and Infinity are no JSON.

    Raises ApiError or ClientGoneError.
    """
    data, _ = await _read(request, limit)
    return data


async def _read(request: Request, limit: int) -> tuple[object, bool]:
    """Return the parsed body, and whether it is a heavy one: work on it then belongs in turns."""
    _check_headers(request, limit)
    body, marks = await _received(request, limit)
    heavy = marks > _LIGHT_MARKS or len(body) > _LIGHT_BYTES
    if marks > MAX_VALUES:
        await _check_cost(request, body)
    if heavy:
        await _turn(request)
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"The body is not standard JSON (line {error.lineno}, column {error.colno}).") from None
    if marks > MAX_DEPTH:
        _check_depth(data)
    return data, heavy


def _check_headers(request: Request, limit: int) -> None:
    """Raises ApiError for a body that is no JSON or too long by what its headers say."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError("The body must be JSON: send 'Content-Type: application/json'.")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaTypeError("The body must be sent as it is, without 'Content-Encoding'.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise PayloadTooLargeError(f"The body is longer than {limit} bytes.")


async def _received(request: Request, limit: int) -> tuple[bytearray, int]:
    """Return the bytes of a body and `most_marks` of it. Raises ApiError, and ClientGoneError."""
    body, marks, room = bytearray(), 0, request.app.state.body_room
    assert isinstance(room, MemoryBudget)
    try:
        with room.space(caller_of(request).owner) as space:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise PayloadTooLargeError(f"The body is longer than {limit} bytes.")
                    space.read(piece)
                    marks += most_marks(piece)
    except TimeoutError:
        raise RequestTimeoutError(f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return body, marks


async def _check_cost(request: Request, body: bytearray) -> None:
    """Refuse a body that takes long to parse, with a BadRequestError: one of too many values, named or bare."""
    counter = ShapeCounter()

    def count() -> Steps[None]:
        for start in range(0, len(body), PIECE):
            counter.feed(body[start : start + PIECE])
            if counter.shape.values > MAX_VALUES:
                raise BadRequestError(f"The body has more than {MAX_VALUES} values.")
            if counter.shape.items > MAX_ITEMS:
                raise BadRequestError(f"The body has more than {MAX_ITEMS} items in arrays and objects.")
            yield

    await unless_gone(request, _turns(request).run(caller_of(request).owner, count()))


def _turns(request: Request) -> LoopTurns:
    turns = request.app.state.loop_turns
    assert isinstance(turns, LoopTurns)
    return turns


async def _turn(request: Request) -> None:
    await _turns(request).turn(caller_of(request).owner)


def _check_depth(data: object) -> None:
    """Refuse more than MAX_DEPTH objects and arrays in one another, with a BadRequestError: recursion has an end."""
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _values(each) if isinstance(inner, dict | list)]
        if not level:
            return
    raise BadRequestError(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _values(value: object) -> Iterable[object]:
    """What an object or an array holds; nothing for an array without either, such as millions of ids, or a scalar."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) and not _HOLDERS.isdisjoint(map(type, value)) else ()


def refusal(error: ValidationError, data: object) -> BadRequestError:
    """What is wrong farthest inside, where a union came closest to fitting, and the parameter it is about.

    Of a union's branches at one place, that which takes values of the type given came closest.
    """
    if not isinstance(data, Mapping):
        return BadRequestError("The body must be a JSON object.", code="invalid_value")
    errors = error.errors(include_url=False, include_input=False)[:_ERRORS_READ]
    found = [(_param(_place(each), data), each) for each in errors]
    param, first = max(found, key=lambda pair: (len(pair[0] or ""), not pair[1]["type"].endswith("_type")))
    message = first["msg"].removeprefix("Value error, ")
    match first["type"]:
        case "extra_forbidden":
            return UnknownParameterError(f"Unknown parameter: '{param}'.", param=param)
        case "missing" | "union_tag_not_found":
            return BadRequestError(
                f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
            )
        case "union_tag_invalid":
            kinds, kind = first["ctx"]["expected_tags"], first["ctx"]["tag"][:_TAG_SHOWN]
            message = f"Input should be one of {kinds}, not '{kind}'"
    where = f" for '{param}'" if param else ""
    return BadRequestError(f"Invalid value{where}: {message}.", param=param, code="invalid_value")


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    """Where it is: of an object of no known kind, in the field that says of which kind it is."""
    if error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        return (*error["loc"], error["ctx"]["discriminator"].strip("'"))
    return error["loc"]


def _param(loc: tuple[int | str, ...], data: Any) -> str | None:
    """`messages[0].content` of a location; pydantic's names for branches of a union, not in the data, are left out."""
    path = ""
    for place, step in enumerate(loc):
        missing = place == len(loc) - 1 and isinstance(step, str) and step.isidentifier()
        if isinstance(step, int) and isinstance(data, Sequence) and step < len(data):
            path, data = f"{path}[{step}]", data[step]
        elif isinstance(data, Mapping) and (step in data or missing):
            path, data = (f"{path}.{step}" if path else str(step)), data.get(step)
    return path or None
