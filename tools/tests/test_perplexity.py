"""Tests of perplexity: quantization barely changes the embedded model on text like its corpus."""

import pytest

from tercet.kernels.native.library import missing_library
from tercet.scheduler.model_files import resolve_model
from tools.perplexity import conversations, perplexity, windows_of


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_int8_is_within_half_a_percent_of_bfloat16() -> None:
    model = resolve_model("embedded")
    windows = windows_of(model, conversations(model, 100), 3000)
    exact, whole, int8, int4 = (perplexity(model, windows, name) for name in ("float32", "bfloat16", "int8", "int4"))
    assert 1 < exact < 20  # text of its corpus
    assert abs(whole / exact - 1) < 0.005
    assert abs(int8 / whole - 1) < 0.005
    assert abs(int4 / whole - 1) < 0.02
