"""Supervisor that starts, watches and stops every part. It serves no HTTP and imports no other part."""

import contextlib
import queue
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import assert_never

from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.frontend.supervisor.process import ChildProcess
from tercet.frontend.supervisor.restart_policy import (
    Action,
    GiveUp,
    Kill,
    PartTable,
    RestartScheduled,
    Start,
    StartupSlow,
    Timeouts,
)
from tercet.frontend.supervisor.terminal import Display, QueuedTerminal
from tercet.protocol.messages.messages import Heartbeat, Message, Progress, Ready, SupervisorInbox
from tercet.protocol.messages.values import Phase, Role, Task
from tercet.protocol.node import Answer, NodeConfig, PeerReady, PeerUp, ThreadNode
from tercet.protocol.system.claimed_directory import remove_unclaimed

POLL_INTERVAL = 1.0
"""Seconds between checks of heartbeats; exits and messages are handled at once."""
ABORT_GRACE = 2.0
"""Seconds that frontends have, after the drain, to send errors to the clients that are still served."""
TERMINATE_GRACE = 5.0
"""Seconds that the other parts have to end."""
EXIT_INTERRUPTED = 130
"""Exit code after a second Ctrl-C."""
EXIT_NOT_STARTED = 127
"""Exit code of a process that could not be started, as in a shell."""


class Supervisor:
    """Loop that keeps `parts` alive until `stop`. `run` belongs to one thread; any thread may call `stop`.

    After `stop`, frontends have `drain` seconds to finish their requests. When all parts are ready for the first time,
    the thread of `run` calls `on_ready`, and the display's thread then calls `announce` with each part's Ready, since
    it may have to wait for the terminal. `failure` says why `run` returned without `stop`.
    """

    def __init__(
        self,
        parts: Sequence[LaunchSpec],
        directory: Path,
        display: Display,
        *,
        listener: socket.socket | None = None,
        log_level: str = "info",
        log_format: str = "text",
        timeouts: Timeouts | None = None,
        drain: float = 0.0,
        on_ready: Callable[[], None] = lambda: None,
        announce: Callable[[dict[str, Ready]], None] = lambda _: None,
    ) -> None:
        self._parts = {part.name: part for part in parts}
        self._directory = directory
        self._display = QueuedTerminal(display)
        self._listener = listener
        self._on_ready = on_ready
        self._announce = announce
        self.failure: GiveUp | None = None
        self._was_ready = False
        self._drain_seconds = drain
        timeouts = timeouts or Timeouts()
        self._arguments = (
            *("--listen", f"ipc://{directory}", "--supervisor", f"ipc://{directory}/supervisor.*"),
            *("--log-level", log_level, "--log-format", log_format),
        )
        self._table = PartTable(self._parts, timeouts, time.monotonic())
        self._ready_messages: dict[str, Ready] = {}
        self._processes: dict[str, ChildProcess] = {}
        self._exits: queue.SimpleQueue[tuple[str, int, str]] = queue.SimpleQueue()
        self._heartbeats: deque[tuple[str, float, Heartbeat]] = deque()
        """Appended by the node's thread, which does not wake `run` for heartbeats."""
        self._stop_requests = 0
        config = NodeConfig(Role.SUPERVISOR, "supervisor", f"ipc://{directory}", silence=2 * timeouts.loading_silence)
        answers: dict[type[Message], Answer] = {Heartbeat: self._on_heartbeat}
        self._node = ThreadNode(config, SupervisorInbox, lambda _: Heartbeat(phase=Phase.IDLE), answers)

    def stop(self) -> None:
        """Stop every part and let `run` return. A second call ends the wait for them. Not to be called concurrently."""
        self._stop_requests += 1
        self._node.wake()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def run(self) -> int:
        """Start every part and watch them until `stop`, or until a part cannot be started. Return the exit code."""
        self._node.start()
        try:
            self.failure = self._watch()
        finally:
            self._shut_down()
            self._node.close("the server stops")
            if self.failure is not None:
                self._display.line(f"tercet: error: {self.failure.reason}")
            self._display.close()
        if self.failure is not None:
            return self.failure.code
        return 0 if self._stop_requests == 1 else EXIT_INTERRUPTED

    def _watch(self) -> GiveUp | None:
        while not self._stop_requests:
            actions = self._handle_messages(min(POLL_INTERVAL, self._table.deadline - time.monotonic()))
            actions += self._handle_exits()
            actions += self._table.tick(time.monotonic())
            if not self._table.all_ready and (give_up := self._directory_removed()):
                return give_up
            for action in actions:
                if isinstance(action, GiveUp):
                    return action
                self._apply(action)
            if not self._was_ready and self._table.all_ready:
                self._was_ready = True
                self._on_ready()
                self._display.call(partial(self._announce, dict(self._ready_messages)))
        return None

    def _directory_removed(self) -> GiveUp | None:
        """Return why no part can connect: their sockets' directory, in which parts find each other, was removed."""
        if Path(self._node.address.removeprefix("ipc://")).exists():
            return None
        return GiveUp(
            f"{self._directory}, where the sockets of its parts lie, was removed: none that starts is found", 1
        )

    def _apply(self, action: Start | Kill | RestartScheduled | StartupSlow) -> None:
        match action:
            case Start(name):
                self._start(self._parts[name])
            case Kill(name, reason):
                self._display.line(f"tercet: warning: {name} hangs and is killed: {reason}")
                if process := self._processes.get(name):
                    process.kill_hung()
            case RestartScheduled(name, reason, wait, left):
                when = f"in {wait:.0f} s" if wait else "now"
                how = f"{name} left" if left else f"warning: {name} died"
                self._display.line(f"tercet: {how}: {reason}; it starts again {when}")
            case StartupSlow(name, state):
                self._display.line(f"tercet: {name} is {state} ({self._describe_links(name)})")
            case _:
                assert_never(action)

    def _describe_links(self, name: str) -> str:
        """Describe the links to a part, or whether it listens."""
        sockets = [path.name for path in self._directory.glob(f"{name}.*.ipc")]
        links = [link for link in self._node.links if any(socket in link for socket in sockets)]
        return "; ".join(links) or f"it {'listens' if sockets else 'does not listen'}, and is not linked"

    def _start(self, part: LaunchSpec) -> None:
        listener = self._listener if part.inherits_listener else None
        try:
            self._processes[part.name] = ChildProcess(
                part,
                ("--peer", part.name, *self._arguments, *self._extra_arguments(part)),
                socket_fd=None if listener is None else listener.fileno(),
                on_line=lambda line: self._display.output(part.name, line),
                on_exit=lambda code, last_error: self._on_process_exit(part.name, code, last_error),
            )
        except OSError as error:  # no memory, process ids or interpreter: handled like a death
            self._on_process_exit(part.name, EXIT_NOT_STARTED, f"cannot be started: {error}")

    def _extra_arguments(self, part: LaunchSpec) -> Sequence[str]:
        """Return a part's startup arguments until it has been ready; after that, the weights a scheduler had loaded."""
        ready = self._ready_messages.get(part.name)
        if ready is None:
            return part.startup_args
        path = ready.identity.weights_path if ready.identity is not None else ""
        return [f"--weights={path}"] if path else []

    def _on_process_exit(self, name: str, code: int, last_error: str) -> None:
        """Pass an exit from the thread that saw it to the thread of `run`."""
        self._exits.put((name, code, last_error))
        self._node.wake()

    def _on_heartbeat(self, name: str, message: Message) -> None:
        if isinstance(message, Heartbeat):
            self._heartbeats.append((name, time.monotonic(), message))

    def _handle_messages(self, wait: float) -> list[Action]:
        """Wait for messages for at most `wait` seconds, then handle all that have arrived."""
        deliveries = self._node.drain(max(0.0, wait))
        now = time.monotonic()
        actions: list[Action] = []
        while self._heartbeats:
            name, then, heartbeat = self._heartbeats.popleft()
            actions += self._table.on_heartbeat(name, then, heartbeat)
        for delivery in deliveries:
            name, message = delivery.source, delivery.message
            if isinstance(message, PeerUp):
                actions += self._table.on_heartbeat(name, now)
            elif isinstance(message, PeerReady):
                self._on_part_ready(name, message.ready, now)
            elif isinstance(message, Progress) and name in self._processes:
                self._display.progress(name, message.text, message.done, message.total)
        return actions

    def _on_part_ready(self, name: str, ready: Ready, now: float) -> None:
        if name not in self._processes:
            return
        self._table.on_ready(name, now)
        self._ready_messages[name] = ready
        self._display.done(name)
        limits = ready.limits
        what = f": {limits.model}, context {limits.context_length:,} tokens" if limits else ""
        if ready.identity is not None and ready.identity.weights_path:
            what += f", weights of {ready.identity.weights_path}"
        generates = limits is not None and limits.task is Task.GENERATE
        cache = f", KV cache {limits.max_total_tokens:,} tokens" if limits and generates else ""
        if limits is not None and not generates:
            self._table.optional |= {part.name for part in self._parts.values() if part.role is Role.DETOKENIZER}
        self._display.line(f"tercet: {name} is ready{what}{cache}")

    def _handle_exits(self) -> list[Action]:
        actions: list[Action] = []
        with contextlib.suppress(queue.Empty):
            while True:
                actions += self._on_part_exit(*self._exits.get_nowait())
        return actions

    def _on_part_exit(self, name: str, code: int, last_error: str) -> list[Action]:
        """Remove the sockets that a process left behind, before its successor starts, and schedule the restart."""
        self._processes.pop(name, None)
        self._display.done(name)
        for path in self._directory.glob(f"{name}.*.ipc"):
            path.unlink(missing_ok=True)
        return self._table.on_exit(name, code, last_error, time.monotonic())

    def _shut_down(self) -> None:
        """Stop the frontends first, while the other parts can still finish their requests; then the others."""
        if self._listener is not None:
            self._listener.close()
        frontends = [process for process in self._processes.values() if process.part.role is Role.FRONTEND]
        self._terminate(frontends, self._drain_seconds if self._was_ready else TERMINATE_GRACE)
        self._terminate(frontends, ABORT_GRACE)
        for process in frontends:
            process.kill()
        others = list(self._processes.values())
        self._terminate(others, TERMINATE_GRACE)
        for process in others:
            process.kill()
        while self._processes:
            self._node.drain(POLL_INTERVAL)
            self._handle_exits()
        for ready in self._ready_messages.values():
            if ready.identity is not None and ready.identity.weights_path:
                remove_unclaimed(Path(ready.identity.weights_path).parent)  # only if they arrived in messages

    def _terminate(self, group: Sequence[ChildProcess], grace: float) -> None:
        """Send SIGTERM to the processes and wait for at most `grace` seconds; a second stop ends the wait."""
        for process in group:
            process.terminate()
        deadline = time.monotonic() + grace
        while (
            any(each.alive for each in group) and (left := deadline - time.monotonic()) > 0 and self._stop_requests < 2
        ):
            self._node.drain(left)
            self._handle_exits()
