"""Program that uses an engine and leaves it in one of several ways: engine_program.py HOW.

It prints the process ids of the parts, then the output of HOW.
"""

import atexit
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from tercet.frontend.engine.engine import Engine, EngineError
from tercet.frontend.supervisor.options import ServeConfig
from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.protocol.messages.values import Role


def make_parts(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
    command = (sys.executable, str(Path(__file__).with_name("echo.py")), "0")
    return [LaunchSpec("scheduler-0", Role.SCHEDULER, command), LaunchSpec("detokenizer-0", Role.DETOKENIZER, command)]


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def leave_it(engine: Engine) -> None:
    """End without closing the engine."""


def be_killed_after_a_fork(engine: Engine) -> None:
    """Die as if memory had run out, with a living child that holds the inherited resources."""
    child = os.fork()
    if child == 0:
        os.close(sys.stdout.fileno())
        os.close(sys.stderr.fileno())
        time.sleep(60)
        os._exit(0)
    say(child)
    os.kill(os.getpid(), signal.SIGKILL)


def use_it_in_a_fork(engine: Engine) -> None:
    """Use the engine in a child that ends like an interpreter; then use it once more in the parent."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            engine.generate("one")
        except EngineError as error:
            say(error)
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    say(engine.generate("one two", {"max_new_tokens": 2})["text"])


WAYS: dict[str, Callable[[Engine], None]] = {
    each.__name__: each for each in (leave_it, be_killed_after_a_fork, use_it_in_a_fork)
}


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 has one for forks of programs with threads
    started = Engine(make_parts=make_parts)
    say(*started.supervisor.pids().values())
    WAYS[sys.argv[1]](started)
