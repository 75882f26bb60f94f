"""Tests of the survey of model types on transformers' modules; a slow one runs the survey."""

from typing import Any

import pytest

from tools import survey_fallback
from tools.survey_fallback import Verdict, compared, model_types, survey


def test_other_log_probabilities_are_wrong() -> None:
    right = [[(5, -1.0), (7, -2.0)], [(3, -0.5)]]
    assert compared(right, right).kind == "right"
    assert compared([[(5, -1.0), (7, -2.01)], [(3, -0.5)]], right).kind == "WRONG"
    assert compared([[(5, -1.0), (7, float("nan"))], [(3, -0.5)]], right).kind == "WRONG"
    tied = [[(6, -1.0), (9, -8.0)], [(3, -0.5)]]
    assert compared(tied, right).kind == "right", "what follows another of two equal tokens is another text"


def test_a_type_whose_process_dies_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Verdict:
        raise KeyError("no such field")

    monkeypatch.setattr(survey_fallback, "judge", fail)
    [(_, verdict)] = survey({"any": ("AnyForCausalLM",)})
    assert verdict.kind == "WRONG"
    assert "KeyError" in verdict.line


def test_all_types_are_known() -> None:
    types = model_types()
    assert len(types) > 200
    assert types["phimoe"] == ("PhimoeForCausalLM",)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_type_is_wrong() -> None:
    verdicts = dict(survey(model_types()))
    assert not {name: verdict for name, verdict in verdicts.items() if verdict.kind == "WRONG"}
    assert sum(verdict.kind == "right" for verdict in verdicts.values()) > 50
