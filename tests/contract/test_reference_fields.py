"""Each architecture applies, may ignore or refuses every field of config.json that transformers knows."""

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from tercet.scheduler.architectures import WRAPPERS, generators
from tercet.scheduler.models.config.field_support import EVERY, OF_OTHERS, FieldTable
from tercet.scheduler.models.config.rope_config import HONOURED_ROPE
from tercet.scheduler.models.config.text_config import WRAPPER_FIELDS
from tercet.scheduler.models.registry import family_of
from tools.reference_fields import decoders

LISTS: Mapping[str, Any] = tomllib.loads(decoders.FILE.read_text())


def own_fields(architecture: str) -> set[str]:
    """Return the fields that an architecture's own files name."""
    listed = LISTS[architecture]
    return {*listed["read"], *listed["declared"], *listed["aliases"], *listed["aliases"].values()}


def tables_of(architecture: str) -> list[FieldTable]:
    """Return the tables of an architecture; a model that reads more than text shares its files with its text model."""
    texts = {*WRAPPERS.get(architecture, {}).values()}
    within = texts or any(architecture in others.values() for others in WRAPPERS.values())
    return [family_of(text).fields for text in texts or {architecture}] + [WRAPPER_FIELDS] * bool(within)


def test_the_lists_are_those_of_the_installed_source() -> None:
    """A failure means a new transformers: run python -m tools.reference_fields, and classify the new fields."""
    assert decoders.written() == decoders.FILE.read_text()


def test_there_is_a_list_for_every_architecture() -> None:
    assert LISTS.keys() - {"shared", "transformers"} == set(generators())


@pytest.mark.parametrize("architecture", sorted(generators()))
def test_every_field_has_one_fate(architecture: str) -> None:
    shared = {*LISTS["shared"]["read"], *LISTS["shared"]["declared"]}
    known = own_fields(architecture) | shared
    tables = [*tables_of(architecture), EVERY]
    undecided = {name for name in known if not any(table.support_of(name) for table in tables)}
    assert not undecided, "say in `fields` of the family's record what becomes of these fields"
    for table in tables:
        fates = [set(table.honoured), set(table.aliases), set(table.without_effect), set(table.refused)]
        assert len(set().union(*fates)) == sum(map(len, fates)), "a field has two fates in one table"


@pytest.mark.parametrize("architecture", sorted(generators()))
def test_what_a_family_reads_itself_is_not_left_to_others(architecture: str) -> None:
    """A new field in the files of a family fails here, even if another family's is known."""
    own = {name for name in own_fields(architecture) if EVERY.without_effect.get(name) == OF_OTHERS}
    tables = tables_of(architecture)
    assert not {name for name in own if not any(table.support_of(name) for table in tables)}


def test_every_key_of_a_rotation_is_honoured() -> None:
    keys = set().union(*(LISTS[name]["rope"] for name in (*generators(), "shared")))
    assert keys <= HONOURED_ROPE
