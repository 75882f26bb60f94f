"""Small templates with the rules of published ones, one for each rule that messages are converted for."""

from packages.frontend.tests.chat.tool_templates import GPT_OSS

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
_CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
_HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
ONE_CALL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}"
    "{% endif %}<call>{{ m.tool_calls[0].function.arguments | tojson }}{% else %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}{% endfor %}"
)
"""The rule of Llama 3.1."""
CALL_WITHOUT_TEXT = (
    _HEAD + "{% if m.content is string and m.content %}{{ m.content }}{% elif m.tool_calls %}" + _CALLS + "{% endif %}"
    "{% endfor %}"
)
"""Distilled DeepSeek R1 renders calls only where the content is empty."""
CALLS_BESIDE_TOOLS = _HEAD + "{{ m.content or '' }}{% if tools and m.tool_calls %}" + _CALLS + "{% endif %}{% endfor %}"
"""Hunyuan renders calls only in chats with tools."""
CALL_NOTATION_IN_TEXT = (
    _HEAD.replace("{{ tools | tojson }}", "{{ tools | tojson }} Answer with <tool_call>.")
    + "{{ m.content }}{% endfor %}"
)
"""SmolLM 3 has tools and results of tools; calls stand in the content."""
MISTRAL = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if m.role == 'user' or "
    "(m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}"
    "{%- if m.role == 'user' %}[INST]{{ m.content }}{%- elif m.tool_calls %}[CALL]"
    "{{ m.tool_calls[0].function.arguments | tojson }}{%- elif m.role == 'tool' %}[TOOL]{{ m.content }}"
    "{%- elif m.content or true %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""Turns alternate, and results of tools are no turns."""
THINKING = (
    _HEAD
    + "{% if m.thinking is defined %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content or '' }}"
    + (_CALLS.replace("m.tool_calls", "m.tool_calls or []") + "{% endfor %}")
)
"""LFM 2.5."""
REASONING = THINKING.replace("m.thinking", "m['reasoning']")
"""Solar Open."""
THINKING_PARTS = _HEAD + (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}" + _CALLS.replace("m.tool_calls", "m.tool_calls or []") + "{% endfor %}"
)
"""Ministral 3."""
THINKING_OR_CONTENT = GPT_OSS.replace(
    "{%- elif message.role == 'assistant' and 'tool_calls' in message %}",
    "{%- elif message.role == 'assistant' and 'tool_calls' not in message %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{%- elif message.role == 'assistant' and 'tool_calls' in message %}"
    "{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}"
    "{%- elif message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ message.content or message.thinking }}<|end|>{% endif %}",
)
"""gpt-oss takes either reasoning or content beside a call."""
THINKING_INSTEAD = _HEAD + (
    "{% if m.thinking is defined and not m.tool_calls %}{{ m.thinking }}{% else %}{{ m.thinking }}{{ m.content }}"
    "{% endif %}" + _CALLS.replace("m.tool_calls", "m.tool_calls or []") + "{% endfor %}"
)
"""A published variant of gpt-oss's template leaves out the content of an answer that has reasoning."""

SHAPES = {
    "plain": PLAIN,
    "system first": SYSTEM_FIRST,
    "no system": NO_SYSTEM,
    "ignores later": IGNORES_LATER,
    "alternating": SYSTEM_ALTERNATING,
    "one call": ONE_CALL,
    "call without text": CALL_WITHOUT_TEXT,
    "calls beside tools": CALLS_BESIDE_TOOLS,
    "call notation in text": CALL_NOTATION_IN_TEXT,
    "mistral": MISTRAL,
    "thinking": THINKING,
    "reasoning": REASONING,
    "thinking parts": THINKING_PARTS,
    "thinking or content": THINKING_OR_CONTENT,
    "thinking instead": THINKING_INSTEAD,
}
