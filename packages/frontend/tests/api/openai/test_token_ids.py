"""Lists of token ids: taken and refused as pydantic alone does."""

from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from tercet.frontend.api.openai.token_ids import QUICK_IDS, TokenId

PLAIN = TypeAdapter(Annotated[list[TokenId], Field(min_length=1, fail_fast=True)])
QUICK: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[TokenId], Field(min_length=1, fail_fast=True), QUICK_IDS])


@pytest.mark.parametrize(
    "value",
    [
        [0],
        [5, 2**31 - 1],
        [],
        [1, -1],
        [1, 2**31],
        [1, 2**70],
        [True],
        [1.0],
        [1.5],
        ["7"],
        [[1]],
        [None],
        "12",
        None,
        {},
    ],
)
def test_a_value_is_taken_or_refused_as_by_pydantic(value: Any) -> None:
    def outcome(adapter: TypeAdapter[list[int]]) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            return error.errors()

    assert outcome(QUICK) == outcome(PLAIN)
