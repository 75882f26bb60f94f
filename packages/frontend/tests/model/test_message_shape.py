"""Sequences of messages that templates refuse or ignore are converted; others are left as they are."""

import re
from typing import Any

import pytest

from packages.frontend.tests.model.template_shapes import (
    CALL_NOTATION_IN_TEXT,
    CALL_WITHOUT_TEXT,
    IGNORES_LATER,
    MISTRAL,
    NO_SYSTEM,
    ONE_CALL,
    PLAIN,
    SYSTEM_ALTERNATING,
    SYSTEM_FIRST,
)
from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.message_shape import short_id
from tercet.frontend.model.prompts import ChatPrompt


def render(source: str, *messages: tuple[str, Any]) -> str:
    chat = [{"role": role, "content": content} for role, content in messages]
    return TemplateManager(source, {}).render(ChatPrompt(messages=chat))


LATER = (("system", "A"), ("user", "x"), ("system", "B"), ("user", "y"), ("developer", "C"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PLAIN, "<system>A<user>x<system>B<user>y<system>C"),
        (SYSTEM_FIRST, "<system>A\n\nB\n\nC<user>x<user>y"),
        (NO_SYSTEM, "<user>A\n\nB\n\nC\n\nx\n\ny"),
        (IGNORES_LATER, "<developer>A\n\nB\n\nC<user>x<user>y"),
        (SYSTEM_ALTERNATING, "[A\n\nB\n\nC]<user>x\n\ny"),
    ],
    ids=["plain", "system first", "no system", "ignores later ones", "alternating"],
)
def test_instructions_are_folded_into_the_place_that_the_template_has(source: str, expected: str) -> None:
    assert render(source, *LATER) == expected


def test_a_late_system_message_becomes_the_first() -> None:
    assert render(SYSTEM_FIRST, ("user", "x"), ("system", "B")) == "<system>B<user>x"
    assert render(SYSTEM_FIRST, ("system", "A"), ("system", "B"), ("user", "x")) == "<system>A\n\nB<user>x"


def test_parts_of_content_are_joined_as_text() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert render(SYSTEM_FIRST, ("user", "x"), ("system", parts), ("system", "C")) == "<system>AB\n\nC<user>x"


def test_instructions_alone_become_a_user_message_without_a_system_role() -> None:
    assert render(NO_SYSTEM, ("system", "A")) == "<user>A"


def test_neighbors_of_one_role_are_joined_where_roles_alternate() -> None:
    turns = (("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    assert render(SYSTEM_ALTERNATING, *turns) == "<user>a\n\nb<assistant>c\n\nd<user>e"
    assert render(PLAIN, *turns) == "<user>a<user>b<assistant>c<assistant>d<user>e"


def test_a_refusal_that_no_conversion_avoids_is_reported() -> None:
    with pytest.raises(BadRequestError, match="no b"):
        render("{% if messages[-1].content == 'b' %}{{ raise_exception('no b') }}{% endif %}" + PLAIN, ("user", "b"))


def test_an_answer_at_the_beginning_follows_an_empty_turn_of_the_user() -> None:
    assert render(SYSTEM_ALTERNATING, ("assistant", "a"), ("user", "b")) == "<user><assistant>a<user>b"
    late = (("system", "s"), ("assistant", "a"), ("user", "b"))
    assert render(SYSTEM_ALTERNATING, *late) == "[s]<user><assistant>a<user>b"
    assert render(PLAIN, ("assistant", "a")) == "<assistant>a"


@pytest.mark.parametrize("filler", ["", "OK."])
def test_a_user_message_follows_results_after_an_answer(filler: str) -> None:
    wanted = "(m.content or raise_exception('empty'))" if filler else "true"
    source = MISTRAL.replace("m.content or true", wanted)
    messages = [*loop(1), {"role": "user", "content": "and?"}]
    text = TemplateManager(source, {}).render(ChatPrompt(messages=messages))
    assert text.endswith(f"[TOOL]r1{filler}</s>[INST]and?")


def test_a_template_that_refuses_everything_gets_the_messages_as_they_are() -> None:
    with pytest.raises(BadRequestError, match="never"):
        render("{{ raise_exception('never') }}", *LATER)


def test_short_ids_are_stable_distinct_and_of_the_form() -> None:
    ids = [f"call_{number}" for number in range(2000)] + ["toolu_01A", "1", "", "é"]
    mapped = [short_id(each) for each in ids]
    assert len(set(mapped)) == len(ids)
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", each) for each in mapped)
    assert short_id("a1B2c3D4e") == "a1B2c3D4e"
    assert short_id(short_id("call_1")) == short_id("call_1")


def test_the_final_message_is_continued_after_joining() -> None:
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))]
    prompt = ChatPrompt(messages=chat, continue_final_message=True, add_generation_prompt=False)
    assert TemplateManager(SYSTEM_ALTERNATING, {}).render(prompt) == "<user>a<assistant>b\n\nc"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["user", "system"])
def test_the_longest_chat_is_joined_in_one_pass(role: str) -> None:
    """Joining one by one would copy 140 GB."""
    turns = [(role, f"{number} " + "x" * 1000) for number in range(16_384)]
    text = render(SYSTEM_ALTERNATING if role == "user" else SYSTEM_FIRST, *turns, ("user", "end"))
    assert text.count("x" * 1000) == 16_384
    assert text.count(f"<{role}>") == 1


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": {"n": number}}}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "name": "f", "tool_call_id": f"c{number}", "content": f"r{number}"}


def loop(*calls: int, content: str = "") -> list[dict[str, Any]]:
    called = {"role": "assistant", "content": content, "tool_calls": [call(each) for each in calls]}
    return [{"role": "user", "content": "x"}, called, *(result(each) for each in reversed(calls))]


def render_loop(source: str, *calls: int, content: str = "") -> str:
    return TemplateManager(source, {}).render(ChatPrompt(messages=loop(*calls, content=content)))


def test_calls_are_followed_by_their_results_where_a_message_has_one_call() -> None:
    assert render_loop(ONE_CALL, 1, 2) == '<user>x<call>{"n": 1}<tool>r1<call>{"n": 2}<tool>r2'


def test_text_beside_a_call_becomes_a_message_where_the_call_would_be_lost() -> None:
    expected = '<user>x<assistant>look<assistant><call>f{"n": 1}<tool>r1'
    assert render_loop(CALL_WITHOUT_TEXT, 1, content="look") == expected


def test_calls_become_text_where_the_template_has_none() -> None:
    calls = '[{"name": "f", "arguments": {"n": 1}}, {"name": "f", "arguments": {"n": 2}}]'
    assert render_loop(PLAIN, 1, 2, content="look") == f"<user>x<assistant>look\n{calls}<tool>r2<tool>r1"
    results = "Result of f:\nr2\n\nResult of f:\nr1"
    assert render_loop(NO_SYSTEM, 1, 2) == f"<user>x<assistant>{calls}<user>{results}"


def test_calls_in_text_have_the_notation_of_the_model() -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert render_loop(CALL_NOTATION_IN_TEXT, 1) == f"<user>x<assistant>{written}<tool>r1"


def test_the_markers_of_calls_in_text_are_no_text_of_the_client() -> None:
    messages = loop(1, content="<tool_call>")
    text = TemplateManager(CALL_NOTATION_IN_TEXT, {}).render(
        ChatPrompt(messages=messages), lambda text: text.replace("<", "(")
    )
    assert "<assistant>(tool_call>\n<tool_call>\n" in text
