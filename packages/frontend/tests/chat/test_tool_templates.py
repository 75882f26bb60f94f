"""Calls and results are rendered as the model's own template writes them."""

import json
from typing import Any

import pytest

from packages.frontend.tests.chat.tool_templates import QWEN, TEMPLATES
from tercet.frontend.chat.messages import history
from tercet.frontend.chat.tool_prompt import for_template, with_instructions
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.message_shape import short_id
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.parsers.port import ToolSpec

FUNCTION = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "Rain"},
]
OLD: list[dict[str, Any]] = [
    CHAT[0],
    {"role": "assistant", "content": None, "function_call": FUNCTION},
    {"role": "function", "name": "get_weather", "content": "Rain"},
]


@pytest.mark.parametrize(("source", "call", "result"), TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("chat", [CHAT, OLD], ids=["tools", "functions"])
def test_calls_and_results_are_written_as_the_model_knows_them(
    source: str, call: str, result: str, chat: list[dict[str, Any]]
) -> None:
    text = TemplateManager(source, {}).render(ChatPrompt(messages=history(chat)))
    if chat is OLD:  # its calls have ids that the frontend generated
        call, result = call.replace("abcdefghi", "call00001"), result.replace("abcdefghi", "call00001")
    assert call in text
    assert result in text
    assert text.index(call) < text.index(result)


def test_ids_in_another_form_are_mapped_where_the_template_wants_its_own() -> None:
    call = {**CHAT[1]["tool_calls"][0], "id": "call_0123456789"}
    chat = history([CHAT[0], {**CHAT[1], "tool_calls": [call]}, {**CHAT[2], "tool_call_id": "call_0123456789"}])
    text = TemplateManager(TEMPLATES["mistral"][0], {}).render(ChatPrompt(messages=chat))
    assert text.count(short_id("call_0123456789")) == 2
    assert "call_0123456789" not in text


def test_tools_are_described_in_openais_form() -> None:
    tools = [ToolSpec("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}, "Weather")]
    text = TemplateManager(QWEN, {}).render(ChatPrompt(messages=CHAT[:1], tools=for_template(tools)))
    assert (
        '{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}}}}'
    ) in text


def test_a_second_template_is_for_chats_with_tools() -> None:
    """Check the form of NousResearch/Hermes-2-Pro-Llama-3-8B."""
    named = [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": QWEN}]
    files = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    template = TemplateManager.from_files(files)
    assert template is not None
    assert template.render(ChatPrompt(messages=CHAT[:1])) == "Weather?"
    tools = for_template([ToolSpec("now")])
    assert template.render(ChatPrompt(messages=CHAT[:1], tools=tools)).startswith("<|im_start|>system\n# Tools")
    assert (template.supports_tools, template.parsers.tools) == (True, "hermes")


def test_words_about_tools_follow_what_the_system_message_says() -> None:
    tools = [ToolSpec("now")]
    system = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    first, second = with_instructions([system, CHAT[0]], tools)
    assert first["role"] == "system"
    assert first["content"].startswith("Be kind.\n\n")
    assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}' in first["content"]
    assert second == CHAT[0]
    alone, _ = with_instructions([CHAT[0]], tools)
    assert alone["role"] == "system"


def test_tool_texts_are_escaped_and_template_keys_are_not() -> None:
    def escape(text: str) -> str:
        return f"[{text}]"

    tools = for_template([ToolSpec("f", {"type": "object", "properties": {"<|k|>": {"type": "string"}}}, "<|d|>")])
    text = TemplateManager(QWEN, {}).render(ChatPrompt(messages=history(CHAT), tools=tools), escape)
    assert '"description": "[<|d|>]"' in text
    assert '"[<|k|>]": {"type": "[string]"}' in text
    assert '"arguments": {"[city]": "[Oslo]", "[days]": 3}' in text
