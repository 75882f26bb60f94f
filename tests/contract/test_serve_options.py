"""`tercet serve` has the scheduler's options, choices and limits, although neither package imports the other."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from tercet.frontend.supervisor.options import CHOICES, ConfigError, SchedulerOptions
from tercet.scheduler.config import ConfigError as SchedulerConfigError
from tercet.scheduler.config import ExpertOptions, HostOptions, ModelOptions, ProcessOptions, ScheduleOptions
from tercet.scheduler.core.config import PolicyName
from tools.docs_pages import attribute_docstrings

KINDS: list[Any] = [ProcessOptions, ModelOptions, ScheduleOptions, HostOptions, ExpertOptions]
PARTS: dict[str, Any] = {option.name: part for part in KINDS for option in fields(part)}
HINTS = {name: hint for part in KINDS for name, hint in get_type_hints(part).items()}
OPTIONS = [option.name for option in fields(SchedulerOptions)]
NUMBERS = [name for name, hint in get_type_hints(SchedulerOptions).items() if hint == int | None]
NAMED = {"schedule_policy": [str(name) for name in PolicyName]}


@pytest.mark.parametrize("option", CHOICES)
def test_the_choices_are_those_of_schedulers(option: str) -> None:
    assert list(CHOICES[option]) == NAMED.get(option, list(get_args(HINTS[option])))
    text = attribute_docstrings(SchedulerOptions)[option]
    assert [name for name in CHOICES[option] if name not in text] == []


def test_no_option_with_choices_is_left_out() -> None:
    assert {name for name in OPTIONS if get_origin(HINTS[name]) is Literal or HINTS[name] is PolicyName} <= set(CHOICES)


def test_every_option_is_one_of_schedulers() -> None:
    assert [name for name in OPTIONS if name not in PARTS] == []
    whole = [name for name in PARTS if HINTS[name] in (int, int | None)]
    assert [name for name in OPTIONS if name in whole and name not in NUMBERS] == ["kv_cache_bytes"], "a size has units"
    assert [name for name in NUMBERS if name not in whole] == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_memory_is_refused_as_by_schedulers(share: float) -> None:
    refusals: list[tuple[Any, type[ValueError]]] = [
        (SchedulerOptions, ConfigError),
        (ScheduleOptions, SchedulerConfigError),
    ]
    for options, refusal in refusals:
        options(mem_fraction_static=0.5)
        with pytest.raises(refusal, match="--mem-fraction-static must be above 0 and below 1"):
            options(mem_fraction_static=share)


@pytest.mark.parametrize("option", NUMBERS)
def test_the_least_value_is_that_of_schedulers(option: str) -> None:
    least = 0 if option in {"max_loras", "node_rank"} else 1
    refusals: list[tuple[Any, type[ValueError]]] = [
        (SchedulerOptions, ConfigError),
        (PARTS[option], SchedulerConfigError),
    ]
    for options, refusal in refusals:
        options(**{option: least})
        with pytest.raises(refusal, match=option.replace("_", "-")):
            options(**{option: least - 1})


def test_the_default_in_a_description_is_that_of_schedulers() -> None:
    texts, options = attribute_docstrings(SchedulerOptions), ScheduleOptions()
    assert f"{options.max_lora_rank} when not given" in texts["max_lora_rank"]
    assert f"{options.max_loras} unless" in texts["max_loras"]
