"""Grafana can show the whole dashboard: no panels overlap, and every expression is valid.

`tests/e2e/test_monitoring.py` compares its series and labels with a server.
"""

from itertools import combinations
from typing import Any

import pytest

from tests.monitoring_files import alerts, dashboard, panels, parsed

PANELS = [pytest.param(panel, id=panel["title"]) for panel in panels()]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_every_panel_has_a_place_and_an_id_of_its_own() -> None:
    everything = dashboard()["panels"]
    ids = [panel["id"] for panel in everything]
    assert len(set(ids)) == len(ids) > 20
    places = {panel["title"]: panel["gridPos"] for panel in everything}
    assert len(places) == len(everything), "two with one title"
    assert all(place["x"] + place["w"] <= 24 for place in places.values())
    pairs = combinations(places.items(), 2)
    assert [(one, other) for (one, a), (other, b) in pairs if overlap(a, b)] == []


def test_variables_choose_the_source_the_models_and_the_frontends() -> None:
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
    assert [*variables] == ["datasource", "model", "instance"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name in ("model", "instance"):
        assert variables[name]["datasource"] == SOURCE
        assert variables[name]["includeAll"]
        assert variables[name]["allValue"] == ".*", "a scheduler that has not said its model yet has none"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows_in_which_unit_and_from_where(panel: dict[str, Any]) -> None:
    assert panel["type"] in {"stat", "timeseries"}
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == SOURCE
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references) > 0


@pytest.mark.parametrize("panel", PANELS)
def test_every_expression_can_be_read_and_heeds_the_variables(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert parsed(target["expr"])
        assert target["legendFormat"], "or Grafana writes all labels"
        assert target["expr"].count('instance=~"$instance"') == target["expr"].count("tercet_")


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in alerts()])
def test_every_alert_can_be_read(rule: dict[str, Any]) -> None:
    assert parsed(rule["expr"])
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
