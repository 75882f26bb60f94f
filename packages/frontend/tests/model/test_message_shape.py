"""Sequences of messages that templates refuse or ignore are converted; others are left as they are."""

import re
from typing import Any

import pytest

from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.message_shape import short_id
from tercet.frontend.model.prompts import ChatPrompt

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""The rule of Qwen 3.5."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""The rules of Gemma 2."""
IGNORES_LATER = (
    "{% if messages[0].role in ('system', 'developer') %}<developer>{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
"""gpt-oss renders instructions at the beginning only."""
SYSTEM_ALTERNATING = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Llama 2 has a system message and alternates."""


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
    with pytest.raises(BadRequestError, match="roles must alternate"):
        render(SYSTEM_ALTERNATING, ("assistant", "a"), ("user", "b"))


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
