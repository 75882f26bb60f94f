"""What deploy/monitoring asks of Prometheus, and what docs/api.md lists, is what a server tells."""

import re
from collections import defaultdict

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy_files import DEPLOY, ROOT
from tests.server_process import Server

RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PAGE = ROOT / "docs" / "api.md"
Series = dict[str, set[str]]
"""The labels of each series, by its name."""


@pytest.fixture(scope="module")
def series(server: Server) -> Series:
    server.client().completions.create(model=server.model(), prompt="A tercet is", max_tokens=2)
    found: Series = defaultdict(set)
    for family in text_string_to_metric_families(httpx2.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return dict(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_ask_for_series_and_labels_that_there_are(rule: dict[str, object], series: Series) -> None:
    expression = str(rule["expr"])
    asked = set(re.findall(r"tercet_\w+", expression))
    assert asked
    assert asked <= set(series)
    labels = {label for name in asked for label in series[name]}
    sums = [re.split(r",\s*", found) for found in re.findall(r"by \(([^)]*)\)", expression)]
    matched = re.findall(r"(\w+)=~?\"", expression)
    shown = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
    assert {*matched, *shown}.union(*sums) <= labels
    if sums:
        assert set(shown) <= set().union(*sums), "what is summed up has no other labels"


def test_the_api_page_lists_every_series(series: Series) -> None:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = {re.sub(r"_(bucket|sum|count)$", "", name).removeprefix("tercet_") for name in series}
    listed = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert names
    assert names <= listed
