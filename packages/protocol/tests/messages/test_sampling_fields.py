"""The table of sampling parameters."""

from typing import get_type_hints

import pytest

from tercet.protocol.messages.values import SAMPLING_FIELDS, SamplingParams


def test_every_number_has_bounds() -> None:
    numbers = {name for name, hint in get_type_hints(SamplingParams).items() if hint in (int, float)}
    assert set(SAMPLING_FIELDS) == numbers


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_a_neutral_value_is_within_bounds_and_of_the_type(name: str) -> None:
    field = SAMPLING_FIELDS[name]
    assert type(field.neutral) is field.type
    for bounds in (field.wire, field.api):
        assert bounds.least <= field.neutral <= bounds.greatest
