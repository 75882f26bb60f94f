"""Tests of tasks in processes of their own, and of tasks in which the device fails."""

import os
from collections.abc import Iterator

import pytest

from tools.gpu_stages.processes import NOT_RUN, Failed, each, gathered, words
from tools.gpu_stages.scale import Results

FAULT = "CUDA error: an illegal memory access was encountered"


def work(task: str) -> Iterator[int]:
    """Yield the id of the process twice; the task may fail in between."""
    yield os.getpid()
    if task == "faults":
        raise RuntimeError(FAULT)
    if task == "raises":
        raise ValueError("no")
    if task == "dies":
        os._exit(3)
    yield os.getpid()


def of(task: str) -> str:
    return str([*work(task)])


def parts(name: str) -> Iterator[Results]:
    yield {"first": 1}
    if name == "faults":
        raise RuntimeError(FAULT)
    yield {"second": 2}


def test_a_process_takes_tasks_until_the_device_fails_in_it() -> None:
    tasks = ["one", "raises", "two", "faults", "three", "dies", "four"]
    found: dict[str, list[int | Failed]] = {}
    for task, given in each(work, tasks, 1):
        found.setdefault(task, []).append(given)
    assert [*found] == tasks
    processes = [given[0] for given in found.values()]
    assert processes[0] == processes[1] == processes[2] == processes[3]
    assert processes[4] == processes[5]
    assert len({os.getpid(), processes[0], processes[4], processes[6]}) == 4
    assert [given[1] for given in found.values() if given[1] != given[0]] == [
        Failed("ValueError: no", device=False),
        Failed(f"RuntimeError: {FAULT}", device=True),
        Failed("its process ended with exit code 3", device=True),
    ]


@pytest.mark.slow
def test_several_processes_share_the_tasks() -> None:
    both = each(work, ["one", "two"], 2)
    assert {task for task, _ in both} == {"one", "two"}
    *_, said = words(of, ["one", "two", "faults", "three"], 2)
    assert said["faults"] == f"RuntimeError: {FAULT}"
    assert NOT_RUN not in said.values()


def test_nobody_waits_for_tasks_that_nobody_asks_for_any_more() -> None:
    """The processes end when their consumer ends."""
    tasks = each(work, ["one", "two"], 1)
    _, process = next(tasks)
    assert isinstance(process, int)
    tasks.close()  # type: ignore[attr-defined]  # it is a generator
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_without_processes_nothing_is_run_after_the_device_has_failed() -> None:
    *_, said = words(of, ["raises", "faults", "one"], 0)
    assert said == {"raises": "ValueError: no", "faults": f"RuntimeError: {FAULT}", "one": NOT_RUN}


@pytest.mark.parametrize("processes", [0, 1])
def test_what_a_part_has_found_stays_beside_what_ended_it(processes: int) -> None:
    states = [dict(found) for found in gathered(parts, ["faults", "goes on"], processes)]
    assert states[0] == {"faults": {"trouble": NOT_RUN}, "goes on": {"trouble": NOT_RUN}}
    assert states[2] == {
        "faults": {"first": 1, "trouble": f"RuntimeError: {FAULT}"},
        "goes on": {"trouble": NOT_RUN},
    }
    rest = {"first": 1, "second": 2} if processes else {"trouble": NOT_RUN}
    assert states[-1]["goes on"] == rest
