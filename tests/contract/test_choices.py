"""What `tercet serve` lets through are the choices that schedulers have, though neither imports the other."""

from typing import get_args, get_type_hints

import pytest

from tercet.frontend.serve_config import CHOICES
from tercet.kernels.attention.select import backend_names
from tercet.scheduler.config import ModelOptions, ScheduleOptions
from tercet.scheduler.core.config import PolicyName

HINTS = get_type_hints(ModelOptions) | get_type_hints(ScheduleOptions)
NAMED = {"schedule_policy": [str(name) for name in PolicyName], "attention_backend": ["auto", *backend_names()]}


@pytest.mark.parametrize("option", CHOICES)
def test_the_choices_are_those_of_schedulers(option: str) -> None:
    assert list(CHOICES[option]) == NAMED.get(option, list(get_args(HINTS[option])))
