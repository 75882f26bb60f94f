"""Families of the documentation: each has a notation with golden examples, or the page says "none"."""

import re
from pathlib import Path

import pytest

from packages.frontend.tests.parsers.published_templates import TEMPLATES
from packages.frontend.tests.parsers.transcripts import FILES
from tercet.frontend.parsers.families import FAMILIES, Family
from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, ParserNames, detect
from tercet.scheduler.architectures import generators

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
GOLDEN = {path.stem for path in FILES}
NAME = re.compile(r"[A-Z][A-Za-z]+[A-Za-z0-9.-]*|[a-z]+-oss|dots\.llm1")
"""Name of a family in the page, without its version."""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.example)
def test_the_notations_of_a_family_are_detected_in_its_template(family: Family) -> None:
    names = ParserNames(family.reasoning, family.tools)
    assert detect(TEMPLATES[family.example][0]) == names == TEMPLATES[family.example][1]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.example)
def test_a_notation_has_golden_examples_or_the_page_says_none(family: Family) -> None:
    golden = {family.tools: family.tools, family.reasoning: f"reasoning_{family.reasoning}"}
    assert {file for name, file in golden.items() if name is not None} <= GOLDEN
    cells = ["none" if name is None else f"`{name}`" for name in (family.tools, family.reasoning)]
    assert f"| {family.models} | {cells[0]} | {cells[1]} |" in PAGE


def test_every_architecture_that_writes_text_is_listed() -> None:
    listed = {name for family in FAMILIES for name in family.architectures}
    without = "BambaForCausalLM MambaForCausalLM Mamba2ForCausalLM WhisperForConditionalGeneration "
    without += "BartForConditionalGeneration MBartForConditionalGeneration"
    assert listed == set(generators()) - {*without.split()}, "these have no chat templates"


def test_every_family_that_the_page_names_is_listed() -> None:
    rows = re.findall(r"^\| (.+?) \| (?:native kernels|torch, .*?) \|$", PAGE, re.MULTILINE)
    others = PAGE.partition("## Other decoders")[2].partition("## ")[0].partition("Tests compare two kinds of")[2]
    listed = " ".join(family.models for family in FAMILIES)
    named = {name for text in [*rows, others.partition("with\ntransformers")[0]] for name in NAME.findall(text)}
    assert len(rows) == 6
    assert {"Seed-OSS", "MiniMax-M2", "dots.llm1", "Cohere"} <= named
    assert {name for name in named if name.rstrip(".") not in listed} == {"MXFP4", "Bamba", "Nemotron-H"}


def test_every_notation_is_one_of_a_family() -> None:
    assert {family.tools for family in FAMILIES} == {None, *TOOL_FORMATS} - {"generic"}
    assert {family.reasoning for family in FAMILIES} == {None, *REASONING_FORMATS} - {"generic"}


def test_the_readme_counts_the_notations() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{len(TOOL_FORMATS)} notations of calls, {len(REASONING_FORMATS)} of reasoning" in text
