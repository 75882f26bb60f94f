"""Rules are refused as soon as their total size exceeds the limit."""

from collections.abc import Callable

import pytest

from packages.frontend.tests.chat.vocabulary import tokens
from tercet.frontend.chat.rules import Rules
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.limits import MAX_TEXT


@pytest.mark.parametrize("add", [Rules.add, Rules.terminal], ids=["rules", "terminals"])
def test_the_rule_that_is_too_much_is_refused(add: Callable[[Rules, str], str]) -> None:
    rules, most = Rules(tokens()), MAX_TEXT // 1020
    for _ in range(most):
        add(rules, "x" * 1000)  # the name counts, too
    with pytest.raises(BadRequestError, match=f"longer than {MAX_TEXT} bytes") as refused:
        add(rules, "x" * 20_000)
    assert refused.value.param == "tools"
    assert len(rules.text("x").splitlines()) == 1 + most
