"""Queries in deploy/monitoring, parsed by a PromQL parser."""

import json
import re
from collections.abc import Mapping
from typing import Any

import promql_parser as promql
import yaml

from tests.deploy_files import DEPLOY

MONITORING = DEPLOY / "monitoring"
OF_TARGETS = {"instance", "job"}
"""Labels that Prometheus adds to all series."""
_VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*"}
_SET_OPERATORS = {"and", "or", "unless"}

Series = Mapping[str, set[str]]
"""Labels of each series, by its name."""


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    loaded: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def parsed(expression: str) -> promql.Expr:
    """Return an expression with values for Grafana's variables. Raises ValueError if it is invalid."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return promql.parse(expression)


def labels_told(expr: promql.Expr, series: Series) -> set[str] | None:
    """Return the labels of a result; None for a number.

    Asserts that all requested series and labels exist, and that matched sides have the same labels.
    """
    match expr:
        case promql.VectorSelector():
            name = expr.name or ""
            assert name in series, f"there is no {name}"
            labels = series[name] | OF_TARGETS
            assert {matcher.name for matcher in expr.matchers.matchers} <= labels, expr
            return labels
        case promql.MatrixSelector():
            return labels_told(expr.vector_selector, series)
        case promql.Call():
            return _of_call(expr, series)
        case promql.AggregateExpr():
            inner, modifier = labels_told(expr.expr, series), expr.modifier
            assert inner is not None
            if modifier is None:
                return set()
            assert modifier.type == promql.AggModifierType.By, "without is not followed here"
            assert set(modifier.labels) <= inner, expr.prettify()
            return set(modifier.labels)
        case promql.BinaryExpr():
            left, right = labels_told(expr.lhs, series), labels_told(expr.rhs, series)
            assert expr.modifier is None or expr.modifier.matching is None, "on and ignoring are not followed here"
            if left is None or right is None:
                return right if left is None else left
            assert left == right or str(expr.op) in _SET_OPERATORS, f"nothing matches in {expr.prettify()}"
            return left
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels_told(expr.expr, series)
        case promql.NumberLiteral():
            return None
    raise AssertionError(f"{type(expr).__name__} is not followed here")


def _of_call(call: promql.Call, series: Series) -> set[str]:
    vectors = [labels for each in call.args if (labels := labels_told(each, series)) is not None]
    labels = set().union(*vectors)
    if call.func.name == "histogram_quantile":
        assert "le" in labels, f"{call.prettify()} sums up the buckets that it is of"
        labels.discard("le")
    return labels


def placeholders(text: str) -> set[str]:
    """Return the labels that a legend or an alert's annotation shows."""
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
