"""JSON responses."""

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.loop_turns import turns_of
from tercet.frontend.json_number import dump_json


def json_response(value: object) -> Response:
    return Response(dump_json(value), media_type="application/json")


async def json_in_turn(request: Request, value: object) -> Response:
    """Return a response that may be long, written in a turn of the event loop."""
    await turns_of(request).turn(caller_of(request).owner)
    return json_response(value)
