"""Limits on the arguments of calls in a history, which are JSON within JSON."""

from typing import Any

import orjson
import pytest

from tercet.frontend.chat.messages import history
from tercet.frontend.errors import BadRequestError


def calling(*arguments: str) -> dict[str, Any]:
    calls = [
        {"id": f"call{number:05d}", "type": "function", "function": {"name": "f", "arguments": each}}
        for number, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


MANY = orjson.dumps({str(number): 1 for number in range(70_000)}).decode()


@pytest.mark.parametrize(
    "message",
    [calling("{}", MANY), {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": MANY}}],
    ids=["a tool", "a function"],
)
def test_arguments_of_too_many_values_are_never_parsed(
    message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(text: str) -> object:
        assert len(text) < 100
        return {}

    monkeypatch.setattr(orjson, "loads", parsed)
    with pytest.raises(BadRequestError, match="arguments of a call have more than 131072") as error:
        history([{"role": "user", "content": "a"}, message])
    assert error.value.param == "messages[1]"


def test_all_calls_together_are_bounded() -> None:
    half = orjson.dumps({str(number): 1 for number in range(30_000)}).decode()
    assert len(history([calling(half, half)])) == 1
    with pytest.raises(BadRequestError, match="arguments of all calls have more than 524288"):
        history([calling(half)] * 9)
