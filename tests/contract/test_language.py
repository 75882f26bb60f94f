"""The language of the code: first words of docstrings, and names that were retired."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    *("what", "whether", "how", "who", "whom", "whose", "which", "whatever", "whoever", "whichever", "of", "as", "one"),
    *("those", "that", "these", "this", "where", "when", "with", "without", "it", "they", "nobody", "nothing", "no"),
    *("so", "not", "only", "else", "likewise", "anything", "something", "everything", "all", "some", "every", "each"),
}
"""First words of docstrings that no reader understands without the rest of the sentence."""
PHRASES = re.compile(r"\b(whoever|nobody|somebody|whatever|whichever|for ever|is none)\b", re.IGNORECASE)
RETIRED = re.compile(
    r"\b("
    r"AdapterDesk|AdapterOrders|AdapterPlaces|AnswerStream|AskedAborts|AwakeClock|BodyRoom|"
    r"CentredNorm|ChatEnvelope|ChatForm|ChatTurn|ChoiceReader|ComingPrefixes|CompletionForm|"
    r"DecodeMemory|DecodeViews|EngineParts|FollowerProcess|FormingPlan|GrammarDesk|GuidedRows|"
    r"HostNames|InFlight|InStep|NativeForm|OrdersGiven|OrdersTaken|OutlivingShortage|PacedModel|"
    r"PacedSend|ParsedChatForm|PartProcess|PlainDisplay|QuantisedExperts|QuantisedWeight|"
    r"QueuedDisplay|ShortageError|ShrinkingModel|SteadyRows|TerminalDisplay|TextOpening|TextWork|"
    r"TurnPlan|TurnPlanner|WeightsDesk|WeightsOrder"
    r")\b"
)
"""Class names that had a private meaning; docs/glossary.md has the field's."""
SOURCES = sorted(
    path
    for pattern in ("packages/*/src/**/*.py", "tools/**/*.py", "benchmarks/**/*.py")
    for path in ROOT.glob(pattern)
    if "/tests/" not in str(path)
)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module, class or function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=lambda f: str(f.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_a_noun(folder: Path) -> None:
    faults = []
    for path in folder.glob("*.py"):
        for line, text in docstrings(path):
            first = re.match(r"[\W_]*(\w+)", text)
            if first is None or first[1].lower() in FORBIDDEN:
                faults.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
            elif found := PHRASES.search(text):
                faults.append(f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in: {text.splitlines()[0]}")
    assert not faults, "\n".join(faults)


def test_retired_names_are_gone() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in RETIRED.findall(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_names_of_tests_are_short() -> None:
    """A name of at most 70 characters says what is asserted; a docstring says why."""
    tests = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/**/test_*.py")]
    names = [name for path in tests for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))]
    assert [name for name in names if len(name) > 70] == []
