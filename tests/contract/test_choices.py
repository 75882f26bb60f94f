"""`tercet serve` accepts the same choices as schedulers, although neither imports the other."""

from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from tercet.frontend.supervisor.options import CHOICES, SchedulerOptions
from tercet.kernels.attention.select import backend_names
from tercet.scheduler.config import ModelOptions, ScheduleOptions
from tercet.scheduler.core.config import PolicyName

HINTS = get_type_hints(ModelOptions) | get_type_hints(ScheduleOptions)
NAMED = {"schedule_policy": [str(name) for name in PolicyName], "attention_backend": ["auto", *backend_names()]}


@pytest.mark.parametrize("option", CHOICES)
def test_the_choices_are_those_of_schedulers(option: str) -> None:
    assert list(CHOICES[option]) == NAMED.get(option, list(get_args(HINTS[option])))


def test_no_option_with_choices_is_left_out() -> None:
    names = {option.name for option in fields(SchedulerOptions)}
    assert {name for name in names if get_origin(HINTS[name]) is Literal or HINTS[name] is PolicyName} <= set(CHOICES)
