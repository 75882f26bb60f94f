"""Each architecture applies, may ignore or refuses every field of config.json that transformers knows."""

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from tercet.scheduler.architectures import generators
from tercet.scheduler.models.config.field_support import EVERY, OF_OTHERS, support_of
from tercet.scheduler.models.config.rope_config import HONOURED_ROPE, REFUSED_ROPE
from tercet.scheduler.models.registry import family_of
from tools.reference_fields import decoders

LISTS: Mapping[str, Any] = tomllib.loads(decoders.FILE.read_text())


def own_fields(architecture: str) -> set[str]:
    """Return the fields that an architecture's own files name."""
    listed = LISTS[architecture]
    return {*listed["read"], *listed["declared"], *listed["aliases"], *listed["aliases"].values()}


def test_the_lists_are_those_of_the_installed_source() -> None:
    """A failure means a new transformers: run python -m tools.reference_fields, and classify the new fields."""
    assert decoders.written() == decoders.FILE.read_text()


def test_there_is_a_list_for_every_architecture() -> None:
    assert LISTS.keys() - {"shared", "transformers"} == set(generators())


@pytest.mark.parametrize("architecture", sorted(generators()))
def test_every_field_has_one_fate(architecture: str) -> None:
    shared = {*LISTS["shared"]["read"], *LISTS["shared"]["declared"]}
    known = own_fields(architecture) | shared
    family = family_of(architecture).fields
    undecided = {name for name in known if support_of(name, family) is None}
    assert not undecided, "say in `fields` of the family's record what becomes of these fields"
    for table in (family, EVERY):
        fates = [set(table.honoured), set(table.aliases), set(table.without_effect), set(table.refused)]
        assert len(set().union(*fates)) == sum(map(len, fates)), "a field has two fates in one table"


@pytest.mark.parametrize("architecture", sorted(generators()))
def test_what_a_family_reads_itself_is_not_left_to_others(architecture: str) -> None:
    """A new field in the files of a family fails here, even if another family's is known."""
    own = {name for name in own_fields(architecture) if EVERY.without_effect.get(name) == OF_OTHERS}
    assert not {name for name in own if not family_of(architecture).fields.support_of(name)}


def test_every_key_of_a_rotation_has_one_fate() -> None:
    keys = set().union(*(LISTS[name]["rope"] for name in (*generators(), "shared")))
    assert keys <= HONOURED_ROPE | REFUSED_ROPE.keys()
    assert not HONOURED_ROPE & REFUSED_ROPE.keys()
