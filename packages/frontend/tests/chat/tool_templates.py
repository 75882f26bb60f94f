"""Published chat templates, reduced to tools, calls and results."""

QWEN = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}<|im_start|>assistant
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}{{ '\\n' }}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == "tool" %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>
{% endif %}{% endfor %}"""
"""Qwen/Qwen2.5-7B-Instruct: arguments are an object, results are in a user message."""

DEEPSEEK_R1 = """\
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ tool['type'] \
+ '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}\
<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}\
{{ '<｜Assistant｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'tool' %}<｜tool▁output▁begin｜>{{ message['content'] }}<｜tool▁output▁end｜>{% endif %}
{%- endfor %}"""
"""deepseek-ai/DeepSeek-R1: arguments are text, and a message with calls must have no content."""

MISTRAL = """\
{%- for message in messages %}
{%- if message["role"] == "user" %}{{ "[INST] " + message["content"] + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for tool_call in message.tool_calls %}{% set out = tool_call.function | tojson %}{{ out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- ', "id": "' + tool_call.id + '"}' }}{{ ", " if not loop.last else "]</s>" }}{% endfor %}
{%- elif message["role"] == "tool" %}[TOOL_RESULTS] {"content": {{ message.content | string }}, \
"call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""
"""mistralai/Mistral-7B-Instruct-v0.3: ids must have nine letters and digits."""

GLM = """\
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
{%- if m.tool_calls %}{% for tc in m.tool_calls %}{% if tc.function %}{% set tc = tc.function %}{% endif %}
<tool_call>{{ tc.name }}
{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% endif %}{% endfor %}"""
"""zai-org/GLM-4.5: arguments are written key by key."""

KIMI = """\
{%- for message in messages %}
{%- if message['role'] == 'user' %}<|im_user|>user<|im_middle|>{{ message['content'] }}<|im_end|>
{%- elif message['role'] == 'assistant' and message.get('tool_calls') %}<|im_assistant|>{{ message['content'] }}\
<|tool_calls_section_begin|>{% for tool_call in message['tool_calls'] %}{% set func = tool_call['function'] %}\
<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>{% if func['arguments'] is string %}\
{{ func['arguments'] }}{% else %}{{ func['arguments'] | tojson }}{% endif %}<|tool_call_end|>{% endfor %}\
<|tool_calls_section_end|><|im_end|>
{%- elif message['role'] == 'tool' %}<|im_system|>{{ message['name'] }}<|im_middle|>## Return of \
{{ message.tool_call_id }}
{{ message['content'] }}<|im_end|>
{%- endif %}{% endfor %}"""
"""moonshotai/Kimi-K2-Instruct: ids are rendered, and results have the tool's name."""

LLAMA = """\
{%- for message in messages %}
{%- if message.role == 'user' %}<|start_header_id|>user<|end_header_id|>{{ message['content'] | trim }}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{%- set tool_call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\
{{ '{"name": "' + tool_call.name + '", "parameters": ' }}{{ tool_call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == "tool" or message.role == "ipython" %}<|start_header_id|>ipython<|end_header_id|>
{%- if message.content is mapping or message.content is iterable and message.content is not string %}
{{- message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endif %}{% endfor %}"""
"""meta-llama/Llama-3.1-8B-Instruct: one call per message."""

GPT_OSS = """\
{%- for message in messages %}
{%- if message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'assistant' and 'tool_calls' in message %}
{%- set tool_call = message.tool_calls[0].function %}{% set last.name = tool_call.name %}<|start|>assistant to=\
functions.{{ tool_call.name }}<|channel|>commentary json<|message|>{{ tool_call.arguments | tojson }}<|call|>
{%- elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>\
{{ message.content | tojson }}<|end|>
{%- endif %}{% endfor %}"""
GPT_OSS = "{%- set last = namespace(name='') %}" + GPT_OSS
"""openai/gpt-oss-20b: a result belongs to the tool of the previous call; results are JSON strings."""

TEMPLATES: dict[str, tuple[str, str, str]] = {
    "qwen": (
        QWEN,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call><|im_end|>',
        "<tool_response>\nRain\n</tool_response>",
    ),
    "deepseek_r1": (
        DEEPSEEK_R1,
        'function<｜tool▁sep｜>get_weather\n```json\n{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜>',
        "<｜tool▁output▁begin｜>Rain<｜tool▁output▁end｜>",
    ),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}, "id": "abcdefghi"}]</s>',
        '{"content": Rain, "call_id": "abcdefghi"}',
    ),
    "glm": (
        GLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<tool_response>\nRain\n</tool_response>",
    ),
    "kimi": (
        KIMI,
        '<|tool_call_begin|>abcdefghi<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|>',
        "<|im_system|>get_weather<|im_middle|>## Return of abcdefghi\nRain",
    ),
    "llama": (
        LLAMA,
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}<|eot_id|>',
        "<|start_header_id|>ipython<|end_header_id|>Rain<|eot_id|>",
    ),
    "gpt_oss": (
        GPT_OSS,
        'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo", "days": 3}<|call|>',
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"Rain"<|end|>',
    ),
}
"""Template, rendered call and rendered result of the test."""
