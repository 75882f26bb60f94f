"""Resources of an `Engine`: its parts, the thread of their supervisor, and their client."""

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tercet.frontend.engine.client import EngineClient, EngineError
from tercet.frontend.supervisor.options import ServeConfig
from tercet.frontend.supervisor.parts import LaunchSpec, local_parts
from tercet.frontend.supervisor.restart_policy import Timeouts
from tercet.frontend.supervisor.run_directory import run_directory
from tercet.frontend.supervisor.supervisor import Supervisor
from tercet.frontend.supervisor.terminal import choose_terminal

MakeParts = Callable[[ServeConfig, Path], Sequence[LaunchSpec]]


def offline_parts(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
    """Return all parts but frontends."""
    return local_parts(config, directory, frontends=False)


class EngineProcesses:
    """Parts and client, started by the constructor and ended by `close` or with the process. Raises EngineError."""

    def __init__(self, config: ServeConfig, make_parts: MakeParts) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as closing:
            directory = closing.enter_context(run_directory())
            self.supervisor = Supervisor(
                make_parts(config, directory),
                directory,
                choose_terminal(config.serve),
                log_level=config.serve.log_level,
                timeouts=Timeouts(startup=config.serve.startup_timeout),
                on_ready=self._started.set,
            )
            thread = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)
            thread.start()
            closing.callback(thread.join)
            closing.callback(self.supervisor.stop)
            self.client = EngineClient(directory, config.lora)
            closing.callback(self.client.close)
            atexit.register(self.close)
            closing.callback(atexit.unregister, self.close)
            self._started.wait()
            if self.supervisor.failure is not None:
                raise EngineError(self.supervisor.failure.reason)
            if self._error is not None:
                raise EngineError(f"the parts cannot be watched over: {self._error}") from self._error
            self.model = self.client.wait(self.client.wait_until_ready)
            self.lora = self.client.wait(self.client.loaded_adapters)
            self._closing = closing.pop_all()

    def close(self) -> None:
        """Stop the parts, abort running requests, and wait for the end. In a fork of the process it does nothing."""
        if os.getpid() == self._owner:
            with self._lock:
                self._closing.close()

    def close_in_background(self) -> None:
        """Call `close` in a new thread, because the caller may be one of the threads that it joins."""
        if os.getpid() == self._owner:
            threading.Thread(target=self.close, name="engine-end", daemon=True).start()

    def _supervise(self) -> None:
        try:
            self.supervisor.run()
        except BaseException as error:
            self._error = error
            if self._started.is_set():
                raise
        finally:
            self._started.set()
