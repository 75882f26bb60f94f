"""Tasks in processes of their own: several at a time, and none in a process in which the device has failed.

Once a kernel has broken a device's context, by an illegal access to memory above all, no computation of its process
succeeds. So a task after which the device answers no more is the last of its process: a fresh one takes what follows.
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
    """What stands behind the last that a task gave, if it raised something or its process ended."""

    trouble: str
    device: bool
    """Whether its process can compute nothing more."""


def each(
    run: Callable[[Task], Iterator[Given]], tasks: Iterable[Task], processes: int
) -> Iterator[tuple[Task, Given | Failed]]:
    """What `run` yields of each task, as it comes.

    With `processes` 0 tasks run here, one after another, and none after one in which the device failed.
    """
    return _elsewhere(run, tasks, processes) if processes else _here(run, tasks)


def words(run: Callable[[Task], str], tasks: Sequence[Task], processes: int) -> Iterator[dict[Task, str]]:
    """What is said of each task so far: by `run`, or what it raised, or `NOT_RUN`."""
    said = dict.fromkeys(tasks, NOT_RUN)
    yield said
    for task, word in each(partial(_once, run), tasks, processes):
        said[task] = word.trouble if isinstance(word, Failed) else word
        yield said


def gathered(
    run: Callable[[str], Iterator[Results]], names: Iterable[str], processes: int
) -> Iterator[dict[str, Results]]:
    """What `run` has found of each name so far; "trouble" is what it raised, or `NOT_RUN`."""
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
    """A process that runs a task at a time."""

    def __init__(self, run: Callable[[Any], Iterator[Any]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(run, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Any = None

    def begin(self, task: object) -> None:
        """Let it run one more."""
        self.task = task
        self.pipe.send(task)

    def receive(self) -> Any:
        """What the task gives next, or None where it has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return Failed(f"its process ended with exit code {self._process.exitcode}", device=True)

    def end(self) -> None:
        """Whatever it does."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _work(run: Callable[[Any], Iterator[Any]], pipe: "Connection[Any, Any]") -> None:
    """Tasks from the pipe, as long as the device computes."""
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
