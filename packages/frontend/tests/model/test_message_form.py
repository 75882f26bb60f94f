"""Reasoning of the history reaches templates under the names that they read."""

from typing import Any

import pytest

from packages.frontend.tests.model.template_shapes import (
    PLAIN,
    REASONING,
    THINKING,
    THINKING_INSTEAD,
    THINKING_OR_CONTENT,
    THINKING_PARTS,
)
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.prompts import ChatPrompt

USER = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
RESULT = {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "r"}


def render(source: str, content: str = "", *, calls: bool) -> str:
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": "why"}
    chat = [USER, {**message, "tool_calls": [CALL]}, RESULT] if calls else [USER, message]
    return TemplateManager(source, {}).render(ChatPrompt(messages=chat))


@pytest.mark.parametrize("source", [THINKING, REASONING, THINKING.replace("thinking", "reasoning_content")])
def test_reasoning_has_every_name_that_a_template_reads(source: str) -> None:
    assert render(source, calls=True) == "<user>x<assistant><think>why</think><call>f{}<tool>r"
    assert render(source, "so", calls=False) == "<user>x<assistant><think>why</think>so"


def test_reasoning_becomes_a_part_where_a_template_reads_parts() -> None:
    assert render(THINKING_PARTS, "so", calls=True) == "<user>x<assistant>[THINK]why[/THINK]so<call>f{}<tool>r"
    assert render(THINKING_PARTS, calls=True) == "<user>x<assistant>[THINK]why[/THINK]<call>f{}<tool>r"


def test_reasoning_takes_the_content_in_where_a_template_raises_for_both() -> None:
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert f"{analysis}why<|end|>" in render(THINKING_OR_CONTENT, calls=True)
    assert f"{analysis}why\n\nlook<|end|>" in render(THINKING_OR_CONTENT, "look", calls=True)
    assert "why" not in render(THINKING_OR_CONTENT, "so", calls=False)


def test_reasoning_is_left_out_where_it_would_replace_the_answer() -> None:
    assert render(THINKING_INSTEAD, "so", calls=False) == "<user>x<assistant>so"
    assert render(THINKING_INSTEAD, "so", calls=True) == "<user>x<assistant>whyso<call>f{}<tool>r"


def test_templates_that_read_no_reasoning_get_only_its_standard_name() -> None:
    source = PLAIN + "{{ messages[-1].keys() | list }}"
    assert render(source, "so", calls=False).endswith("['role', 'content', 'reasoning_content']")
