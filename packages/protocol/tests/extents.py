"""Extents of tests with random examples: few examples in an ordinary run, many in a slow one."""

import pytest
from hypothesis import HealthCheck, settings

_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def extents(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test by `extent`, which decorates its function of an example."""
    short, full = (settings(max_examples=count, deadline=None, suppress_health_check=_CHECKS) for count in (few, many))
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "extent", [pytest.param(short, id="short"), pytest.param(full, id="full", marks=slow)]
    )
