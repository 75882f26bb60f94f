"""Child process of a part: its process, the pipe that ends it with its parent, and its output by lines."""

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from io import TextIOWrapper

import msgspec

from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.protocol.messages.values import Role

_FATAL_LINE = re.compile(r"tercet-[a-z]+: ")
"""Beginning of the line in which a part says why it ends."""
_CRASH_LINE = "Fatal Python error: "
"""Beginning of the line that `faulthandler` writes when a fault in native code ends a process. Stacks follow it."""
_INFO_LINE = re.compile(r'[0-9-]{10} [0-9:,]+ (DEBUG|INFO) |{"time":"[^"]*","level":"(DEBUG|INFO)"')
"""Beginning of a log line that does not report a fault."""
_LONGEST_LINE = 1 << 18
"""Characters after which a line is broken."""
_KEYS = ("TERCET_API_KEYS", "TERCET_ADMIN_KEYS")
_DUMP_GRACE = 0.5
"""Seconds for a hung scheduler to write its last events."""
_parent_pipes: set[int] = set()
"""This process's ends of the pipes that keep its parts alive."""


def _close_pipes_after_fork() -> None:
    """Close the pipes in a fork of this process, so that parts do not outlive this process."""
    while _parent_pipes:
        os.close(_parent_pipes.pop())


os.register_at_fork(after_in_child=_close_pipes_after_fork)


class _JsonLine(msgspec.Struct):
    message: str


class ChildProcess:
    """A part's process from start to exit, in a process group of its own, so that Ctrl-C reaches only the supervisor.

    `on_line` receives every line of output except a last line that says why the part ends. `on_exit` receives the exit
    code (negative for a signal) and the last error line. Threads of this object call both. Raises OSError if the
    process cannot be started.
    """

    def __init__(
        self,
        part: LaunchSpec,
        arguments: Sequence[str],
        *,
        socket_fd: int | None,
        on_line: Callable[[str], None],
        on_exit: Callable[[int, str], None],
    ) -> None:
        self.part = part
        self.alive = True
        self._on_line = on_line
        self._on_exit = on_exit
        self._last_error = ""
        parent_end, self._pipe = os.pipe()
        _parent_pipes.add(self._pipe)
        command = [*part.command, *arguments, f"--parent-fd={parent_end}"]
        if socket_fd is not None:
            command.append(f"--fd={socket_fd}")
        environment = {name: value for name, value in os.environ.items() if name not in _KEYS}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment | dict(part.env),
                pass_fds=[parent_end] if socket_fd is None else [parent_end, socket_fd],
                process_group=0,
            )
        except OSError:
            self._close_pipe()
            raise
        finally:
            os.close(parent_end)
        assert self._process.stdout is not None
        self._output = TextIOWrapper(self._process.stdout, encoding="utf-8", errors="replace")
        self._reader = threading.Thread(target=self._read, name=f"{part.name}-output", daemon=True)
        try:
            self._reader.start()
            threading.Thread(target=self._wait, name=f"{part.name}-exit", daemon=True).start()
        except RuntimeError as error:
            self._abort_start()
            raise OSError(str(error)) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process group."""
        self._signal(signal.SIGKILL)

    def kill_hung(self) -> None:
        """Kill the process group; a scheduler gets some time to write its last events before, on SIGUSR1."""
        if self.part.role is not Role.SCHEDULER:
            self.kill()
            return
        self._signal(signal.SIGUSR1)
        timer = threading.Timer(_DUMP_GRACE, self.kill)
        timer.daemon = True
        timer.start()

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(self.pid, number)
                else:
                    os.kill(self.pid, number)

    def _read(self) -> None:
        held = ""
        with self._output:
            for line in iter(lambda: self._output.readline(_LONGEST_LINE), ""):
                if held:
                    self._on_line(held)
                text = line.rstrip()
                held = text if _FATAL_LINE.match(text) else ""
                if text and not held:
                    self._on_line(text)
                self._remember_error(text)

    def _remember_error(self, line: str) -> None:
        """Remember the last line that may report a fault."""
        if line and not _INFO_LINE.match(line) and not self._last_error.startswith(_CRASH_LINE):
            self._last_error = " ".join(_FATAL_LINE.sub("", _message(line), count=1).split())[:500]

    def _wait(self) -> None:
        # While the process is an unreaped zombie, its id is not reused: the survivors of its group are safely killed.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.kill()
        self.alive = False
        code = self._process.wait()
        self._close_pipe()
        self._reader.join(timeout=1.0)
        self._on_exit(code, self._last_error)

    def _abort_start(self) -> None:
        """End the process if its watcher threads cannot be started."""
        self.kill()
        self.alive = False
        self._process.wait()
        self._close_pipe()
        if not self._reader.is_alive():
            self._output.close()

    def _close_pipe(self) -> None:
        _parent_pipes.discard(self._pipe)  # first: a fork in between must not close a reused descriptor
        os.close(self._pipe)


def _message(line: str) -> str:
    """Return the message of a log line in JSON; any other line as it is."""
    try:
        return msgspec.json.decode(line, type=_JsonLine).message
    except msgspec.DecodeError:
        return line
