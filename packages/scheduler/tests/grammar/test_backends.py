"""Which backend a model gets."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar import backends
from tercet.scheduler.grammar.backends import BACKENDS, grammar_backend
from tercet.scheduler.grammar.llguidance import LLGuidanceBackend
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError
from tercet.scheduler.model_files import resolve_model


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_a_backend_not_made_yet_says_of_itself_what_it_says_when_it_is(name: str) -> None:
    pytest.importorskip(name)
    model = resolve_model("embedded")
    backend = grammar_backend(name, model, 3072, [3])
    made = BACKENDS[name]((model / "tokenizer.json").read_text(encoding="utf-8"), 3072, [3])
    assert backend is not None
    assert (backend.name, [*backend.end_ids]) == (made.name, [*made.end_ids])


def test_a_tokenizer_is_read_when_the_first_grammar_comes_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarBackend[Any]:
        made.append(vocab_size)
        return LLGuidanceBackend(tokenizer, vocab_size, end_ids)

    monkeypatch.setitem(BACKENDS, "llguidance", make)
    backend = grammar_backend("llguidance", resolve_model("embedded"), 3072, [3])
    assert backend is not None
    assert not made
    for _ in range(2):
        assert not backend.compile(Grammar(GrammarKind.REGEX, "a+")).error
    assert made == [3072]


def test_a_tokenizer_that_turns_out_to_be_useless_is_every_grammars_error(tmp_path: Path) -> None:
    shutil.copy(resolve_model("embedded") / "tokenizer.json", tmp_path)
    backend = grammar_backend("llguidance", tmp_path, 100, [3])
    assert backend is not None
    for _ in range(2):
        with pytest.raises(GrammarError, match="tokenizer cannot be used for grammars: vocab size too small"):
            backend.compile(Grammar(GrammarKind.REGEX, "a+"))


def test_whatever_a_backend_raises_of_a_tokenizer_is_every_grammars_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> Any:
        raise KeyError("model")

    shutil.copy(resolve_model("embedded") / "tokenizer.json", tmp_path)
    monkeypatch.setitem(BACKENDS, "llguidance", make)
    backend = grammar_backend("llguidance", tmp_path, 3072, [3])
    assert backend is not None
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"tokenizer\.json cannot be read: KeyError: 'model'"):
            backend.compile(Grammar(GrammarKind.REGEX, "a+"))
    assert grammar_backend("llguidance", tmp_path, 3072, []) is None


def test_none_is_none_and_nonsense_is_refused() -> None:
    assert grammar_backend("none", resolve_model("embedded"), 3072, [3]) is None
    with pytest.raises(ValueError, match="no grammar backend 'grep'; there are llguidance, xgrammar and none"):
        grammar_backend("grep", resolve_model("embedded"), 3072, [3])


def test_an_extra_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"xgrammar is not installed: install the extra tercet-scheduler\[xgrammar\]"):
        grammar_backend("xgrammar", resolve_model("embedded"), 3072, [3])


def test_a_tokenizer_that_cannot_be_used_leaves_a_model_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert grammar_backend("llguidance", tmp_path, 3072, [3]) is None
    assert not caplog.records
    shutil.copy(resolve_model("embedded") / "tokenizer.json", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert grammar_backend("llguidance", tmp_path, 100, []) is None
    assert f"model={tmp_path} error=vocab size too small" in caplog.text
