"""Small templates of each published shape render as transformers renders them, or keep a text that it leaves out."""

import pytest

from packages.frontend.tests.chat.tool_templates import TEMPLATES
from packages.frontend.tests.model.template_shapes import SHAPES
from tools.suites.chat_templates import Outcome, chats, compare, table

SOURCES = {name: source for name, (source, _, _) in TEMPLATES.items()} | SHAPES
UNEQUAL = {Outcome.DIFFERS, Outcome.TERCET_REFUSES}


@pytest.mark.parametrize(("name", "source"), SOURCES.items(), ids=SOURCES)
def test_a_template_renders_as_in_transformers_or_better(name: str, source: str) -> None:
    findings = compare(name, source)
    assert len(findings) == len(chats())
    assert [each for each in findings if each.outcome in UNEQUAL] == []
    equal = [each for each in findings if each.outcome in (Outcome.EQUAL, Outcome.OTHER_FORM)]
    assert len(equal) >= 5, table(findings)


def test_a_difference_without_a_reason_is_found() -> None:
    source = "{{ range(99999) | random }}{{ range(99999) | random }}{{ messages[0].content }}"
    assert Outcome.DIFFERS in {each.outcome for each in compare("random", source)}
