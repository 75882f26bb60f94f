"""A server exports the series that deploy/monitoring uses and docs/api.md lists."""

import re
from collections import defaultdict
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy_files import ROOT
from tests.monitoring_files import OF_TARGETS, alerts, dashboard, labels_told, panels, parsed, placeholders
from tests.server_process import Server

PAGE = ROOT / "docs" / "api.md"


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    server.client().completions.create(model=server.model(), prompt="A tercet is", max_tokens=2)
    return httpx2.get(f"{server.url}/metrics").text


@pytest.fixture(scope="module")
def series(text: str) -> dict[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return dict(found)


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_alerts_ask_for_series_and_labels_that_there_are(rule: dict[str, Any], series: dict[str, set[str]]) -> None:
    told = labels_told(parsed(rule["expr"]), series)
    assert told is not None
    assert placeholders(str(rule["annotations"])) <= told, "what is summed up has no other labels"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_panels_ask_for_series_and_labels_that_there_are(panel: dict[str, Any], series: dict[str, set[str]]) -> None:
    for target in panel["targets"]:
        told = labels_told(parsed(target["expr"]), series)
        assert told is not None
        assert placeholders(target["legendFormat"]) == told, "lines that cannot be told apart, or a name that is empty"


def test_variables_are_labels_that_there_are(series: dict[str, set[str]]) -> None:
    _, *variables = dashboard()["templating"]["list"]
    for variable in variables:
        names = re.findall(r"tercet_\w+", variable["query"])
        assert names
        label = variable["query"].rpartition(", ")[2].removesuffix(")")
        assert all(label in series[name] | OF_TARGETS for name in names)


def test_a_request_has_waited_and_its_scheduler_has_its_model(server: Server, text: str) -> None:
    values = {
        (sample.name, sample.labels.get("model")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    model = server.model()
    assert values["tercet_queue_seconds_count", model] == values["tercet_time_to_first_token_seconds_count", model] > 0
    assert 0 < values["tercet_queue_seconds_sum", model] <= values["tercet_time_to_first_token_seconds_sum", model]
    assert ("tercet_slots", model) in values


def test_the_api_page_lists_every_series(series: dict[str, set[str]]) -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = {re.sub(r"_(bucket|sum|count)$", "", name).removeprefix("tercet_") for name in series}
    listed = {name for line in table for name in re.findall(r"`([\w:]+)`", line.split("|")[1])}
    assert names
    assert names <= listed
