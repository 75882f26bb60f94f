"""Template variables for options of reasoning."""

from typing import get_args

import pytest

from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.chat.chat_request import ChatOptions
from tercet.frontend.chat.template_variables import template_variables
from tercet.frontend.errors import UnsupportedParameterError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def turn(effort: str | None, *, thinking: bool | None = None) -> ChatOptions:
    return ChatOptions(messages=[], reasoning_effort=effort, thinking=thinking)


def test_these_are_all_efforts_of_the_api() -> None:
    annotation = ChatRequest.model_fields["reasoning_effort"].annotation
    assert {each for part in get_args(annotation) for each in get_args(part)} == set(EFFORTS)


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_switch_is_off_for_none_and_on_for_the_rest(effort: str) -> None:
    told = template_variables(turn(effort), {"enable_thinking", "messages"}, reasons=True)
    assert told == {"enable_thinking": effort != "none"}


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_template_that_knows_the_word_gets_the_word(effort: str) -> None:
    assert template_variables(turn(effort), {"reasoning_effort"}, reasons=True) == {"reasoning_effort": effort}


@pytest.mark.parametrize("effort", EFFORTS[1:])
def test_a_model_that_always_reasons_takes_any_effort(effort: str) -> None:
    assert template_variables(turn(effort), {"messages"}, reasons=True) == {}


def test_a_model_that_always_reasons_cannot_be_told_not_to() -> None:
    with pytest.raises(UnsupportedParameterError, match="always reasons") as refused:
        template_variables(turn("none"), {"messages"}, reasons=True)
    assert refused.value.param == "reasoning_effort"


@pytest.mark.parametrize("effort", EFFORTS[1:])
def test_a_model_without_reasoning_takes_no_effort(effort: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="no reasoning") as refused:
        template_variables(turn(effort), {"messages"}, reasons=False)
    assert refused.value.param == "reasoning_effort"


def test_a_model_without_reasoning_does_none() -> None:
    assert template_variables(turn("none"), {"messages"}, reasons=False) == {}


def test_whoever_switches_reasoning_off_may_still_name_an_effort() -> None:
    assert template_variables(turn("low", thinking=False), {"thinking"}, reasons=True) == {"thinking": False}
    assert template_variables(turn("low", thinking=False), set(), reasons=False) == {}
