"""Tasks in processes of their own: several at a time, and none in a process in which the device has failed.

Once a kernel has broken a device's context, above all by an illegal memory access, no computation in its process
succeeds. A task after which the device does not answer is therefore the last of its process: a fresh one continues.
"""

import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from tercet.kernels.device import has_failed
from tercet.kernels.errors import DeviceFailedError
from tools.gpu_stages.scale import Results

NOT_RUN = "not run"

Task = TypeVar("Task", bound=Hashable)
Given = TypeVar("Given")


@dataclass(frozen=True)
class Failed:
    """Last result of a task that raised or whose process ended."""

    trouble: str
    device: bool
    """Its process can compute nothing more."""


def each(
    run: Callable[[Task], Iterator[Given]], tasks: Iterable[Task], processes: int
) -> Iterator[tuple[Task, Given | Failed]]:
    """Yield the results of `run` for each task, as they come.

    With `processes` 0, tasks run in this process, one after another, and none after one in which the device failed.
    """
    return _elsewhere(run, tasks, processes) if processes else _here(run, tasks)


def words(run: Callable[[Task], str], tasks: Sequence[Task], processes: int) -> Iterator[dict[Task, str]]:
    """Yield the results of all tasks so far: of `run`, or its exception, or `NOT_RUN`."""
    said = dict.fromkeys(tasks, NOT_RUN)
    yield said
    for task, word in each(partial(_once, run), tasks, processes):
        said[task] = word.trouble if isinstance(word, Failed) else word
        yield said


def gathered(
    run: Callable[[str], Iterator[Results]], names: Iterable[str], processes: int
) -> Iterator[dict[str, Results]]:
    """Yield the results of `run` by name so far; "trouble" is its exception, or `NOT_RUN`."""
    found: dict[str, Results] = {name: {"trouble": NOT_RUN} for name in names}
    yield found
    begun = set()
    for name, part in each(run, [*found], processes):
        before = found[name] if name in begun else {}
        begun.add(name)
        found[name] = before | ({"trouble": part.trouble} if isinstance(part, Failed) else part)
        yield found


def _once(run: Callable[[Task], str], task: Task) -> Iterator[str]:
    yield run(task)


def _here(run: Callable[[Task], Iterator[Given]], tasks: Iterable[Task]) -> Iterator[tuple[Task, Given | Failed]]:
    for task in tasks:
        for given in _outcome(run, task):
            yield task, given
            if isinstance(given, Failed) and given.device:
                return


def _outcome(run: Callable[[Task], Iterator[Given]], task: Task) -> Iterator[Given | Failed]:
    try:
        yield from run(task)
    except DeviceFailedError as error:
        traceback.print_exc()
        yield Failed(str(error), device=True)
    except Exception as error:
        traceback.print_exc()
        yield Failed(f"{type(error).__name__}: {error}", device=has_failed(error))


class _Worker:
    """Process that runs one task at a time."""

    def __init__(self, run: Callable[[Any], Iterator[Any]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(run, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Any = None

    def begin(self, task: object) -> None:
        """Start a task."""
        self.task = task
        self.pipe.send(task)

    def receive(self) -> Any:
        """Return the task's next result, or None if it has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return Failed(f"its process ended with exit code {self._process.exitcode}", device=True)

    def end(self) -> None:
        """End the process in any state."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(run: Callable[[Any], Iterator[Any]], pipe: "Connection[Any, Any]") -> None:
    """Run tasks from the pipe while the device works."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        for given in _outcome(run, task):
            pipe.send(given)
            if isinstance(given, Failed) and given.device:
                return
        pipe.send(None)


def _elsewhere(
    run: Callable[[Task], Iterator[Given]], tasks: Iterable[Task], processes: int
) -> Iterator[tuple[Task, Given | Failed]]:
    waiting = deque(tasks)
    idle: list[_Worker] = []
    working: dict[Connection[Any, Any], _Worker] = {}
    try:
        while waiting or working:
            while waiting and len(working) < processes:
                worker = idle.pop() if idle else _Worker(run)
                worker.begin(waiting.popleft())
                working[worker.pipe] = worker
            for pipe in wait([*working]):
                worker = working[pipe]  # type: ignore[index]  # there are no others
                given = worker.receive()
                if given is None:
                    idle.append(working.pop(worker.pipe))
                    continue
                if isinstance(given, Failed) and given.device:
                    working.pop(worker.pipe).end()
                yield worker.task, given
    finally:
        for worker in [*idle, *working.values()]:
            worker.end()
