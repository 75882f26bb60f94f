"""Tools reach the prompt wherever the template reads them."""

import json
from typing import Any

import pytest

from tercet.frontend.chat.tool_prompt import for_template
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.parsers.port import ToolSpec

PHI = """\
{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] %}
{{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}<|assistant|>"""
"""microsoft/Phi-4-mini-instruct: the tools are text in the system message."""
GLM = """\
[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}<|system|>
{% for tool in item['tools'] %}{% if tool['type'] == 'function' %}## {{ tool['function']['name'] }}
{{ tool['function'] | tojson }}
{% endif %}{% endfor %}{% endif %}{% if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}
{{ item['content'] }}{% endif %}{% endfor %}<|assistant|>"""
"""zai-org/glm-4-9b-chat-hf: the tools are a list in the system message."""
VARIABLE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
SYSTEM_ONLY = """\
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% for tool in tools or [] %}{{ tool | tojson }}
{%- endfor %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"""
NOTHING = "{% set tools = none %}{% for m in messages %}{{ m.content }}{% endfor %}"

TOOLS = for_template(
    [ToolSpec("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}, "Weather")]
)
USER: dict[str, Any] = {"role": "user", "content": "Oslo?"}


@pytest.mark.parametrize(
    ("source", "supported"),
    [(PHI, True), (GLM, True), (VARIABLE, True), (SYSTEM_ONLY, True), (NOTHING, False)],
    ids=["Phi-4-mini", "GLM-4", "variable", "with a system message", "nothing"],
)
def test_a_template_supports_tools_if_it_renders_them(source: str, supported: bool) -> None:
    template = TemplateManager(source, {})
    assert template.supports_tools is supported
    text = template.render(ChatPrompt(messages=[{"role": "system", "content": "Be kind."}, USER], tools=TOOLS))
    assert ("get_weather" in text) is supported
    assert text.index("Be kind.") < text.index("Oslo?")


@pytest.mark.parametrize("source", [PHI, GLM, SYSTEM_ONLY], ids=["Phi-4-mini", "GLM-4", "with a system message"])
def test_tools_need_no_system_message_of_the_client(source: str) -> None:
    text = TemplateManager(source, {}).render(ChatPrompt(messages=[USER], tools=TOOLS))
    assert text.index("get_weather") < text.index("Oslo?")
    assert "get_weather" not in TemplateManager(source, {}).render(ChatPrompt(messages=[USER]))


OBSERVING = """\
[gMASK]<sop>{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}{% elif message.role == 'assistant' and not message.get('metadata') %}<|assistant|>
{{ message.content }}{% elif message.role == 'observation' %}<|observation|>
{{ message.content }}{% endif %}{% endfor %}<|assistant|>"""
"""zai-org/GLM-4-9B-0414: results of tools have a role of their own, and calls are content."""


def test_a_tool_loop_has_the_calls_and_the_role_of_results_of_the_template() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call_1", "content": "Rain"},
    ]
    text = TemplateManager(OBSERVING, {}).render(ChatPrompt(messages=messages, tools=TOOLS))
    assert text.endswith('<|assistant|>\nget_weather\n{"city": "Oslo"}<|observation|>\nRain<|assistant|>')


def test_phis_tools_are_json_text() -> None:
    text = TemplateManager(PHI, {}).render(ChatPrompt(messages=[USER], tools=TOOLS), lambda part: f"[{part}]")
    listed = json.loads(text.partition("<|tool|>")[2].partition("<|/tool|>")[0])
    assert listed[0]["name"] == "[get_weather]"
    assert listed[0]["parameters"]["type"] == "[object]"
