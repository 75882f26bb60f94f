"""Registry of the grammar backends, by the name of the option."""

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tercet.scheduler.grammar.guarded import GuardedBackend
from tercet.scheduler.grammar.lazy import LazyBackend
from tercet.scheduler.grammar.port import GrammarBackend
from tercet.scheduler.model_files import ModelError, has_tokenizer, reading, tokenizer_files

logger = logging.getLogger(__name__)


def _llguidance(tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarBackend[Any]:
    from tercet.scheduler.grammar.llguidance import LLGuidanceBackend

    return LLGuidanceBackend(tokenizer, vocab_size, end_ids)


def _xgrammar(tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> GrammarBackend[Any]:
    from tercet.scheduler.grammar.xgrammar import XGrammarBackend

    return XGrammarBackend(tokenizer, vocab_size, end_ids)


BACKENDS: dict[str, Callable[[str, int, Sequence[int]], GrammarBackend[Any]]] = {
    "llguidance": _llguidance,
    "xgrammar": _xgrammar,
}
"""Created from the text of a tokenizer.json, the model's vocabulary size and its end ids; ValueError on a mismatch."""
_EXTRAS = ("xgrammar",)
"""Backends in a package of the same name, which an extra of the scheduler installs."""


def grammar_backend(name: str, model: Path, vocab_size: int, end_ids: Sequence[int]) -> GrammarBackend[Any] | None:
    """Return the backend for a model directory; None for "none", and for a model without a tokenizer.

    The tokenizer is read when the first grammar comes. If the model names no end ids, it is read now; one that cannot
    be read then gives None and a log record. Raises ValueError for an unknown name, and for a package that is not
    installed.
    """
    if name == "none":
        return None
    if name not in BACKENDS:
        raise ValueError(f"no grammar backend {name!r}; there are {', '.join(BACKENDS)} and none")
    if name in _EXTRAS and find_spec(name) is None:
        raise ValueError(f"{name} is not installed: install the extra tercet-scheduler[{name}]")
    if not has_tokenizer(model):
        return None

    def make() -> GrammarBackend[Any]:
        with reading("tokenizer.json"):
            text = tokenizer_files(model)["tokenizer.json"].decode()
            try:
                return BACKENDS[name](text, vocab_size, end_ids)
            except ValueError as error:  # its message is for clients
                raise ModelError(str(error)) from error

    if end_ids:
        return GuardedBackend(LazyBackend(f"{name} {version(name)}", end_ids, make))
    try:
        return GuardedBackend(make())
    except ValueError as error:
        logger.warning(
            "grammar backend %s: tokenizer not supported, grammars are refused: model=%s error=%s", name, model, error
        )
        return None
