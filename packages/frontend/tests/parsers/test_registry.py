"""Parser names, detection, and lazy imports."""

import subprocess
import sys

import pytest

from packages.frontend.tests.parsers.published_templates import TEMPLATES
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


@pytest.mark.parametrize("model", TEMPLATES)
def test_parsers_are_detected_in_a_template(model: str) -> None:
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
        "print(before, 'tercet.frontend.parsers.tools.tagged.glm' in sys.modules)"
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
