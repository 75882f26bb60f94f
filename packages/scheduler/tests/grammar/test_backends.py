"""Which backend a model gets."""

import logging
import shutil
from pathlib import Path

import pytest

from tercet.scheduler.grammar import backends
from tercet.scheduler.grammar.backends import grammar_backend
from tercet.scheduler.model_files import resolve_model


def test_the_backend_is_named_with_its_version() -> None:
    backend = grammar_backend("llguidance", resolve_model("embedded"), 3072, [3])
    assert backend is not None
    assert backend.name.startswith("llguidance 1.")
    assert list(backend.end_ids) == [3]


def test_none_is_none_and_nonsense_is_refused() -> None:
    assert grammar_backend("none", resolve_model("embedded"), 3072, [3]) is None
    with pytest.raises(ValueError, match="no grammar backend 'grep'; there are llguidance, xgrammar and none"):
        grammar_backend("grep", resolve_model("embedded"), 3072, [3])


def test_an_extra_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"xgrammar is not installed: pip install 'tercet-scheduler\[xgrammar\]'"):
        grammar_backend("xgrammar", resolve_model("embedded"), 3072, [3])


def test_a_tokenizer_that_cannot_be_used_leaves_a_model_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert grammar_backend("llguidance", tmp_path, 3072, [3]) is None
    assert not caplog.records
    shutil.copy(resolve_model("embedded") / "tokenizer.json", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert grammar_backend("llguidance", tmp_path, 100, [3]) is None
    assert "tokenizer.json cannot be used for grammars: vocab size too small" in caplog.text
