"""Parser names, detection, and lazy imports."""

import subprocess
import sys

import pytest

from packages.frontend.tests.parsers.transcripts import read
from tercet.frontend.parsers.machine import Chain, Machine
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.parsers.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ParserNames,
    detect,
    make_parser,
    reasoning_format,
    tool_format,
)

TEMPLATES = {
    "openai/gpt-oss-20b": (
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }} to=functions. <|call|>",
        ParserNames("gpt_oss", "gpt_oss"),
    ),
    "moonshotai/Kimi-K2-Instruct": (
        "<|im_middle|>{{ '<|tool_calls_section_begin|>' }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        ParserNames(None, "kimi_k2"),
    ),
    "moonshotai/Kimi-K2-Thinking": (
        "<|im_middle|><think>{{ r }}</think><|tool_calls_section_begin|><|tool_call_begin|>",
        ParserNames("kimi_k2", "kimi_k2"),
    ),
    "deepseek-ai/DeepSeek-V3-0324": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name + '\\n' + '```json' + '\\n' }}",
        ParserNames(None, "deepseek_v3"),
    ),
    "deepseek-ai/DeepSeek-R1": (
        "{% if '</think>' in content %} <｜tool▁calls▁begin｜>{{ '```json' }}{{ '<｜Assistant｜><think>\\n' }}",
        ParserNames("deepseek_r1", "deepseek_v3"),
    ),
    "deepseek-ai/DeepSeek-V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ '<｜Assistant｜>' }}{{ '</think>' }}",
        ParserNames("qwen3", "deepseek_v31"),
    ),
    "zai-org/GLM-4.5": (
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value> <think></think>",
        ParserNames("qwen3", "glm"),
    ),
    "Qwen/Qwen3-8B": (
        "<tool_call>\\n{\"name\": <function-name>} {% if '</think>' in content %} enable_thinking",
        ParserNames("qwen3", "hermes"),
    ),
    "Qwen/Qwen2.5-7B-Instruct": ('<tool_call>\\n{"name": <function-name>}\\n</tool_call>', ParserNames(None, "hermes")),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>",
        ParserNames(None, "qwen3_coder"),
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        "{%- set think_end_token = '</seed:think>' -%} <seed:think> <seed:tool_call>\\n<function=f>\\n<parameter=p>v",
        ParserNames("seed_oss", "seed_oss"),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": ('{{ "[TOOL_CALLS] [" }}{{ tool_call }}', ParserNames(None, "mistral_array")),
    "mistralai/Magistral-Small-2509": (
        "[THINK]{{ block }}[/THINK] {{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
        ParserNames("mistral", "mistral"),
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        ParserNames(None, "llama_pythonic"),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
        ParserNames(None, "llama3_json"),
    ),
    "a template without tools": ("<|im_start|>{{ role }}", ParserNames(None, None)),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_a_template_tells_its_parsers(model: str) -> None:
    """The samples are the lines of each model's template that show its notation."""
    template, expected = TEMPLATES[model]
    assert detect(template) == expected


def test_every_name_loads() -> None:
    assert {name: tool_format(name).framing.trigger != "" for name in TOOL_FORMATS} == dict.fromkeys(TOOL_FORMATS, True)
    for name in REASONING_FORMATS:
        assert read(reasoning_format(name).parser("</think>"), ["Well."]).text == "Well."


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'nobody'; there are .*hermes"):
        tool_format("nobody")
    with pytest.raises(ValueError, match=r"'nobody'; there are .*qwen3"):
        reasoning_format("nobody")


def test_parsers_are_imported_when_they_are_asked_for() -> None:
    program = (
        "import sys; from tercet.frontend.parsers import registry; "
        "before = [m for m in sys.modules if m.startswith('tercet.frontend.parsers.tools.')]; "
        "registry.tool_format('glm'); "
        "print(before, 'tercet.frontend.parsers.tools.glm' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[] True"


def test_parsers_are_put_together_by_what_there_is() -> None:
    assert make_parser(ParserNames()) is None
    assert isinstance(make_parser(ParserNames("qwen3", "hermes")), Chain)
    assert isinstance(make_parser(ParserNames("qwen3")), Machine)
    assert isinstance(make_parser(ParserNames("gpt_oss", "gpt_oss")), Machine)


def test_the_tools_of_a_request_decide_what_is_a_call() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    knows = make_parser(ParserNames(tools="llama3_json"), [ToolSpec("Ada")])
    other = make_parser(ParserNames(tools="llama3_json"), [ToolSpec("Bob")])
    assert knows is not None
    assert other is not None
    assert [call.name for call in read(knows, [text]).calls] == ["Ada"]
    assert read(other, [text]).text == text
