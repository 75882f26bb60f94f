"""Output of the supervisor: progress bars and lines on a terminal, plain lines elsewhere."""

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tercet.frontend.supervisor.options import ServeOptions
from tercet.protocol.system.log_lines import json_line, rfc3339

_LEVEL = re.compile(" (error|warning): ")
"""Words that name the level of a line; the first ones count."""
_MAX_QUEUED_OUTPUT = 1000
"""Output lines of parts that may wait to be shown; further ones are dropped."""
_MAX_QUEUED_CALLS = 4000
"""Other calls that may wait."""
_CLOSE_TIMEOUT = 2.0
"""Seconds to show the waiting lines at the end."""


class PlainTerminal:
    """Lines for a log file. Progress with a known total prints one line per tenth."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._shown: dict[str, tuple[str, int]] = {}

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def output(self, name: str, text: str) -> None:
        """Show a line that a part wrote."""
        self.line(f"{name}: {text}")

    def progress(self, name: str, text: str, done: int, total: int) -> None:
        """Show the progress of a part; `total` 0 means unknown."""
        tenth = done * 10 // total if total else 0
        if self._shown.get(name) != (text, tenth):
            self._shown[name] = (text, tenth)
            self.line(f"{name}: {text} {tenth * 10}%" if total else f"{name}: {text}")

    def done(self, name: str) -> None:
        """Forget the progress of a part."""
        self._shown.pop(name, None)

    def close(self) -> None:
        """Leave the screen unchanged."""


class InteractiveTerminal:
    """Terminal with a progress bar for each starting part below the lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream if stream is not None else sys.stderr, highlight=False)
        self._bars = self._new_bars()
        self._tasks: dict[str, TaskID] = {}

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def output(self, name: str, text: str) -> None:
        """Show a line that a part wrote."""
        self.line(f"{name}: {text}")

    def progress(self, name: str, text: str, done: int, total: int) -> None:
        """Show the progress of a part: a bar, or a line if `total` is 0 (unknown)."""
        if not total:
            self.line(f"{name}: {text}")
            return
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], description=f"{name}: {text}", completed=done, total=total)

    def done(self, name: str) -> None:
        """Remove the bar of a part."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._bars.remove_task(task)
            if not self._tasks:
                self.close()

    def close(self) -> None:
        """Remove all bars from the screen."""
        self._tasks.clear()
        self._bars.stop()
        self._bars = self._new_bars()

    def _new_bars(self) -> Progress:
        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )


class JsonTerminal(PlainTerminal):
    """Lines of JSON objects for a log collector: those of parts as they are, and new ones for all other lines."""

    def line(self, text: str) -> None:
        self._write("supervisor", text)

    def output(self, name: str, text: str) -> None:
        if _is_object(text):
            super().line(text)
        else:
            self._write(name, text)

    def _write(self, part: str, text: str) -> None:
        found = _LEVEL.search(text)
        level = found[1].upper() if found else "INFO"
        super().line(json_line({"time": rfc3339(time.time()), "level": level, "part": part, "message": text}))


def _is_object(text: str) -> bool:
    """Return whether a line is a whole JSON object, not a part of a long one or a line of another program."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return False
    return True


Display = PlainTerminal | InteractiveTerminal


class QueuedTerminal:
    """Terminal with a thread of its own, so that neither a stopped terminal nor a flood of output blocks the caller."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._jobs: deque[Callable[[], None]] = deque()
        self._dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)
        self._thread.start()

    def output(self, name: str, text: str) -> None:
        """Show a line that a part wrote; drop and count it if too many wait."""
        self._put(lambda: self._display.output(name, text), _MAX_QUEUED_OUTPUT)

    def line(self, text: str) -> None:
        self.call(lambda: self._display.line(text))

    def progress(self, name: str, text: str, done: int, total: int) -> None:
        self.call(lambda: self._display.progress(name, text, done, total))

    def done(self, name: str) -> None:
        self.call(lambda: self._display.done(name))

    def call(self, job: Callable[[], None]) -> None:
        """Run `job` in the terminal's thread, in order."""
        self._put(job, _MAX_QUEUED_CALLS)

    def close(self) -> None:
        """Show the waiting lines, for a limited time, and restore the screen."""
        self.call(self._display.close)
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT)

    def _put(self, job: Callable[[], None], most: int) -> None:
        with self._changed:
            if len(self._jobs) >= most:
                self._dropped += 1
                return
            if self._dropped and len(self._jobs) < most // 2:
                text = f"tercet: {self._dropped} lines came too fast and were left out"
                self._jobs.append(lambda: self._display.line(text))
                self._dropped = 0
            self._jobs.append(job)
            self._changed.notify()

    def _show(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except (OSError, ValueError):  # ValueError if the stream was closed
                continue  # the screen is gone, and there is no other to report it on


def choose_terminal(options: ServeOptions) -> Display:
    """Return a terminal with progress bars, unless stderr is not a terminal, or every line or JSON is wanted."""
    if options.log_format == "json":
        return JsonTerminal()
    return InteractiveTerminal() if sys.stderr.isatty() and options.log_level != "debug" else PlainTerminal()
