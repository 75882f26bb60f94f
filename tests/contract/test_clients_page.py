"""The settings in docs/clients.md are valid for the programs that read them."""

import ast
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
READERS: dict[str, Callable[[str], object]] = {
    "toml": tomllib.loads,
    "json": json.loads,
    "yaml": yaml.safe_load,
    "python": ast.parse,
}
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_every_notation_has_settings() -> None:
    assert {notation for notation, _ in BLOCKS} == set(READERS)


@pytest.mark.parametrize(("notation", "text"), BLOCKS)
def test_settings_can_be_read(notation: str, text: str) -> None:
    assert READERS[notation](text)
