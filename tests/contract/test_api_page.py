"""docs/api.md names every route and every parameter, with its status."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from tercet.frontend.api.docs.operations import OPERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
STATUSES = {"supported", "ignored", "refused"}
WITH_BODY = [
    pytest.param(path, operation.body, id=path) for (_, path), operation in OPERATIONS.items() if operation.body
]


def plain(path: str) -> str:
    """Return a path as the page writes it."""
    return re.sub(r"{\w+(:\w+)?}", "{id}", path)


def rows(text: str) -> dict[str, str]:
    """Return the status of every parameter in the tables of a text."""
    found = {}
    for names, status in re.findall(r"^\| (`.+?) \| (\w+) \|", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} stands there twice"
            assert status in STATUSES, status
            found[name] = status
    return found


def section_of(path: str) -> str:
    """Return the text under the heading that names the route."""
    [text] = [text for head, text in SECTIONS.items() if plain(path) in re.split(r"[ ,]+", head)]
    return text


def whole(path: str) -> str:
    """Return the section of a route, with the sections that it refers to."""
    text = section_of(path)
    shared = [told for head, told in SECTIONS.items() if f"(#{head.lower().replace(' ', '-')})" in text]
    return "\n".join([text, *shared, *(section_of(other) for other in set(re.findall(r"as in (/[\w/]+)", text)))])


def settings(hint: Any) -> Iterator[type[BaseModel]]:
    """Yield the object types of a parameter; objects in lists are content."""
    if isinstance(hint, type) and not get_args(hint):
        if issubclass(hint, BaseModel):
            yield hint
    elif get_origin(hint) not in (list, dict):
        for each in get_args(hint):
            yield from settings(each)


@pytest.mark.parametrize(("path", "body"), WITH_BODY)
def test_every_field_of_a_parameter_that_is_an_object_is_named(path: str, body: type[BaseModel]) -> None:
    told = set(re.findall(r"`(\w+)`", whole(path)))
    fields = {
        f"{name}.{inner.alias or own}"
        for name, field in body.model_fields.items()
        for model in settings(field.annotation)
        for own, inner in model.model_fields.items()
        if own != "type"
    }
    assert not [each for each in fields if each.rpartition(".")[2] not in told]


@pytest.mark.parametrize(("path", "body"), WITH_BODY)
def test_every_parameter_stands_in_the_table_of_its_route(path: str, body: type) -> None:
    text = section_of(path)
    told = rows(text)
    for shared in re.findall(r"\(#([a-z-]+)\)", text):
        told |= rows(next(text for head, text in SECTIONS.items() if head.lower().replace(" ", "-") == shared))
    fields = {field.alias or name for name, field in body.model_fields.items()}  # type: ignore[attr-defined]
    assert told.keys() == fields, f"docs/api.md: the tables in the section of {path} must have exactly its parameters"


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_route_has_a_heading(method: str, path: str) -> None:
    headings = [head for head in SECTIONS if plain(path) in re.split(r"[ ,]+", head)]
    assert len(headings) == 1, f"docs/api.md: give {method} {path} a section, whose heading has the method and the path"
    assert method in headings[0], f"docs/api.md: add {method} to the heading {headings[0]!r}"
