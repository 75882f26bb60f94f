"""docs/api.md names every route and every parameter, and says what becomes of it."""

import re
from pathlib import Path

import pytest

from tercet.frontend.operations import OPERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
STATUSES = {"supported", "ignored", "refused"}
WITH_BODY = [
    pytest.param(path, operation.body, id=path) for (_, path), operation in OPERATIONS.items() if operation.body
]


def rows(text: str) -> dict[str, str]:
    """Parameter to status, of every table in a text."""
    found = {}
    for names, status in re.findall(r"^\| (`.+?) \| (\w+) \|", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} stands there twice"
            assert status in STATUSES, status
            found[name] = status
    return found


def section_of(path: str) -> str:
    """The text under the one heading that names the route."""
    [text] = [text for head, text in SECTIONS.items() if path in re.split(r"[ ,]+", head)]
    return text


@pytest.mark.parametrize(("path", "body"), WITH_BODY)
def test_every_parameter_stands_in_the_table_of_its_route(path: str, body: type) -> None:
    text = section_of(path)
    told = rows(text)
    for shared in re.findall(r"\(#([a-z-]+)\)", text):
        told |= rows(next(text for head, text in SECTIONS.items() if head.lower().replace(" ", "-") == shared))
    fields = {field.alias or name for name, field in body.model_fields.items()}  # type: ignore[attr-defined]
    assert told.keys() == fields


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_route_has_a_heading(method: str, path: str) -> None:
    plain = re.sub(r"{\w+(:\w+)?}", "{id}", path)
    headings = [head for head in SECTIONS if plain in re.split(r"[ ,]+", head)]
    assert len(headings) == 1
    assert method in headings[0]
