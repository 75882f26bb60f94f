"""Assertion rewriting for the modules that tests share."""

import pytest

pytest.register_assert_rewrite("tests.chaos", "tests.server_process")
