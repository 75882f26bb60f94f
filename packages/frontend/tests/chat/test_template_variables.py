"""Template variables for options of reasoning."""

from typing import Any, get_args

import pytest

from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.chat.template_variables import needs_no_reasoning, template_variables
from tercet.frontend.errors import UnsupportedParameterError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def turn(effort: str | None, *, thinking: bool | None = None) -> ChatOptions:
    return ChatOptions(messages=[], reasoning_effort=effort, thinking=thinking)


def test_these_are_all_efforts_of_the_api() -> None:
    annotation = ChatRequest.model_fields["reasoning_effort"].annotation
    assert {each for part in get_args(annotation) for each in get_args(part)} == set(EFFORTS)


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_switch_is_off_for_none_and_on_for_the_rest(effort: str) -> None:
    variables = template_variables(turn(effort), {"enable_thinking", "messages"}, reasons=True)
    assert variables == {"enable_thinking": effort != "none"}


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_template_that_reads_the_effort_gets_it_unchanged(effort: str) -> None:
    assert template_variables(turn(effort), {"reasoning_effort"}, reasons=True) == {"reasoning_effort": effort}


@pytest.mark.parametrize("effort", EFFORTS[1:])
def test_a_model_that_always_reasons_takes_any_effort(effort: str) -> None:
    assert template_variables(turn(effort), {"messages"}, reasons=True) == {}


OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"reasoning_effort": "none", "thinking": False},
    {"template_kwargs": {"enable_thinking": False}},
    {"template_kwargs": {"thinking": False}},
    {"template_kwargs": {"reasoning_effort": "none"}},
    {"template_kwargs": {"thinking": False}, "reasoning_effort": "high"},
]
ON: list[dict[str, Any]] = [
    {},
    {"reasoning_effort": "low"},
    {"thinking": False},
    {"template_kwargs": {"enable_thinking": True}},
    {"template_kwargs": {"enable_thinking": "no"}},
    {"template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
]


@pytest.mark.parametrize(("options", "off"), [*((each, True) for each in OFF), *((each, False) for each in ON)])
def test_reasoning_is_off_by_every_name(options: dict[str, Any], off: bool) -> None:
    asked = ChatOptions(messages=[], **options)
    assert needs_no_reasoning(asked, frozenset()) is off
    assert template_variables(asked, frozenset(), reasons=True) == {}
    for name in ("enable_thinking", "thinking", "reasoning_effort"):
        assert not needs_no_reasoning(asked, {name})


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("options", OFF[:4] + OFF[5:])
def test_any_name_of_the_switch_sets_the_name_that_is_read(name: str, options: dict[str, Any]) -> None:
    assert template_variables(ChatOptions(messages=[], **options), {name}, reasons=True) == {name: False}


def test_an_effort_of_none_is_left_out_beside_a_switch() -> None:
    read = {"enable_thinking", "reasoning_effort"}
    assert template_variables(turn("none"), read, reasons=True) == {"enable_thinking": False}
    both = {"enable_thinking": True, "reasoning_effort": "low"}
    assert template_variables(turn("low"), read, reasons=True) == both


def test_variables_that_the_template_reads_keep_any_value() -> None:
    kwargs = {"preserve_thinking": {"turns": [1, None, 2.5]}, "thinking_budget": 2**70, "reasoning_effort": ["x"]}
    asked = ChatOptions(messages=[], template_kwargs=kwargs)
    assert template_variables(asked, set(kwargs), reasons=True) == kwargs
    assert template_variables(asked, {"preserve_thinking"}, reasons=True) == {
        "preserve_thinking": kwargs["preserve_thinking"]
    }


@pytest.mark.parametrize("effort", EFFORTS[1:])
def test_a_model_without_reasoning_takes_no_effort(effort: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="no reasoning") as refused:
        template_variables(turn(effort), {"messages"}, reasons=False)
    assert refused.value.param == "reasoning_effort"


def test_a_model_without_reasoning_accepts_an_effort_of_none() -> None:
    assert template_variables(turn("none"), {"messages"}, reasons=False) == {}


def test_an_effort_beside_disabled_reasoning_is_accepted() -> None:
    assert template_variables(turn("low", thinking=False), {"thinking"}, reasons=True) == {"thinking": False}
    assert template_variables(turn("low", thinking=False), set(), reasons=False) == {}
