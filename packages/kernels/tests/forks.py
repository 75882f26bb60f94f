"""Forks of a Python process with slow imports, each of which runs a program without importing again."""

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module


class Forks:
    """Process that forks for each program, with an environment and imports of its own."""

    def __init__(self, *modules: str, env: Mapping[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `-c CODE`, `-m MODULE` or a file, with its arguments, as `subprocess.run([python, *command])` would."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            self._server.stdin.write(json.dumps([folder, *command]) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            out, errors = (_read(f"{folder}/{name}") for name in ("out", "errors"))
        done = subprocess.CompletedProcess(command, code, out, errors)
        if check:
            assert code == 0, errors
        return done

    def close(self) -> None:
        """End the process, by the end of its input."""
        with self._server:
            pass
        assert self._server.returncode == 0


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _commands() -> list[str]:
    """Fork for each command on stdin. Return in a child, with its command; and at the end of stdin, with none."""
    for line in sys.stdin:
        folder, *command = json.loads(line)
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
            sys.stdout.flush()
            continue
        for number, name in ((1, "out"), (2, "errors")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return [*command]
    return []


def _run(first: str, *arguments: str) -> None:
    """Run a program as Python's command line does."""
    match first:
        case "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        case "-m":
            sys.argv = [*arguments]
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        case _:
            sys.argv = [first, *arguments]
            runpy.run_path(first, run_name="__main__")


def _exit_code(command: Sequence[str]) -> int:
    try:
        _run(*command)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    gc.freeze()
    if command := _commands():
        code = _exit_code(command)
        sys.stdout.flush()
        os._exit(code)  # destructors of all imports take half a second
