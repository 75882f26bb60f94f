"""Assertions in the modules that tests share say what they compared, as those in tests do."""

import pytest

pytest.register_assert_rewrite("tests.chaos", "tests.server_process")
