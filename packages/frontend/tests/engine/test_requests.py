from collections.abc import Iterator
from typing import Any

import pytest

from packages.frontend.tests.engine.test_engine import echo_parts
from tercet.frontend.engine import Engine
from tercet.frontend.errors import ApiError

ONE_TOKEN = {"max_new_tokens": 1}


class Scalar:
    """A scalar of an array, as in NumPy."""

    def __init__(self, value: int) -> None:
        self._value = value

    def tolist(self) -> int:
        return self._value


class Array:
    """Common behavior of NumPy arrays, Pandas series and PyTorch tensors, including the refusal to be a bool."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    def __iter__(self) -> Iterator[Any]:
        return iter(Array(each) if isinstance(each, list) else Scalar(each) for each in self._values)

    def tolist(self) -> list[Any]:
        return self._values


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(make_parts=echo_parts()) as started:
        yield started


def test_sampling_parameters_may_be_numbers_of_an_array(engine: Engine) -> None:
    assert engine.generate("one two", {"max_new_tokens": Scalar(2)})["text"] == " one two"


@pytest.mark.parametrize(
    "prompts", [["one", "two"], ("one", "two"), Array(["one", "two"]), dict.fromkeys(["one", "two"]).keys()]
)
def test_prompts_come_in_whatever_holds_them(engine: Engine, prompts: Any) -> None:
    assert [answer["text"] for answer in engine.generate(prompts, ONE_TOKEN)] == [" one", " two"]


@pytest.mark.parametrize("ids", [[3, 4], (3, 4), range(3, 5), Array([3, 4]), list(Array([3, 4]))])
def test_ids_of_one_prompt_come_in_whatever_holds_them(engine: Engine, ids: Any) -> None:
    assert engine.generate(input_ids=ids, sampling_params=ONE_TOKEN)["output_ids"] == [3]


@pytest.mark.parametrize(
    "ids", [[[3], [4]], ((3,), (4,)), Array([[3], [4]]), list(Array([[3], [4]])), [range(3, 4), [4]]]
)
def test_ids_of_several_prompts_too(engine: Engine, ids: Any) -> None:
    assert [answer["output_ids"] for answer in engine.generate(input_ids=ids, sampling_params=ONE_TOKEN)] == [[3], [4]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"prompt": b"one"}, ValueError, "a prompt must be a text, or several in a list, not bytes"),
        ({"prompt": {"text": "one"}}, ValueError, "not dict"),
        ({"prompt": 1}, ValueError, "not int"),
        ({"prompt": ["one", float("nan")]}, ValueError, "prompt 1 of the list is no text but float"),
        ({"input_ids": "one"}, ValueError, "input_ids must be a list of ids, or several of them, not str"),
        ({"input_ids": [[1], 2]}, ValueError, "input_ids"),
        ({"prompt": "one", "sampling_params": "greedy"}, ValueError, "sampling_params must be a mapping"),
        ({"prompt": "one", "sampling_params": ["greedy"]}, ValueError, "sampling_params must be a mapping"),
        ({"prompt": "one", "session_params": {"id": "x"}}, TypeError, "there is no option 'session_params'"),
        ({"prompt": "one", "model": "another"}, TypeError, "there is no option 'model'"),
        ({"prompt": "one", "text": "two"}, TypeError, "there is no option 'text'"),
        ({"prompt": ["one", "two"], "stream": True}, ValueError, "one prompt can be streamed at a time"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    engine: Engine, arguments: dict[str, Any], error: type, text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        engine.generate(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"prompt": "one"}, {"input_ids": [1]}])
def test_a_parameter_out_of_bounds_is_named_in_one_line(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^Invalid value for 'sampling_params.top_p': [^\n]*$"):
        engine.generate(**arguments, sampling_params={"top_p": 2})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"input_ids": [[0], [1], [99]]}, ApiError),
        ({"prompt": ["one"] * 3, "sampling_params": [{}, None, {"max_new_tokens": 5000}]}, ApiError),
        ({"prompt": ["one"] * 3, "sampling_params": [{}, {}, {"top_p": 2}]}, ValueError),
    ],
)
def test_an_error_of_several_prompts_has_a_note_of_which(
    engine: Engine, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        engine.generate(**arguments)
    assert caught.value.__notes__ == ["This is about prompt 2 of the list."]


def test_what_the_model_is_not_for_is_refused(engine: Engine) -> None:
    with pytest.raises(ApiError, match="makes no vectors"):
        engine.encode("one")
    with pytest.raises(ApiError, match="has no chat template"):
        engine.apply_chat_template([{"role": "user", "content": "one"}])
    with pytest.raises(ValueError, match=r"^Invalid value for 'messages\[0\].*[^\n]*$"):
        engine.apply_chat_template([{"role": "nobody", "content": "one"}])
