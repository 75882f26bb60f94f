"""A tiny part: a real process that speaks the protocol to the supervisor and behaves as its first argument says.

serve       says Ready, and exits 0 on SIGTERM
embed       serves; a scheduler's model embeds
answer      serves, and answers each HTTP connection on --fd with its process id
refuse      exits 2 with a message, as a part does that was told nonsense
crash       dies of an exception before it is ready
hang        says Ready, then stops as a whole, heartbeats too; the second time it serves
stuck       says Ready, then heartbeats of one step that never ends; the second time it serves
die         says Ready, then dies of SIGKILL; the second time it serves
loading     reports progress and never gets ready
stubborn    says Ready, and ignores SIGTERM
twice       says Ready, and leaves at the second SIGTERM, of which it tells in --once
leave       says Ready, and exits 0 a little later
flood       serves, and writes lines as fast as it can
parent      serves, with a child process of its own whose id it writes to --once
"""

import argparse
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from tercet.protocol.messages.messages import Heartbeat, Progress, Ready, SupervisorInbox
from tercet.protocol.messages.values import ModelLimits, Phase, Role, Task
from tercet.protocol.node import NodeConfig, PeerUp, ThreadNode
from tercet.protocol.system.process import exit_with_parent, on_signals


def answer(fd: int) -> None:
    """Accept connections on an inherited socket, one at a time."""
    listener = socket.socket(fileno=fd)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            body = f"{os.getpid()} {os.environ.get('TERCET_API_KEYS', 'no keys')}"
            body += os.environ.get("TERCET_ADMIN_KEYS", "")
            connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


def flood() -> None:
    """Write lines without end."""
    while True:
        os.write(1, b"much ado about nothing\n" * 100)


def is_first_start(marker: Path) -> bool:
    first = not marker.exists()
    marker.touch()
    return first


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--once", type=Path, default=Path("/nonexistent"))
    for flag in ("--peer", "--listen", "--supervisor", "--log-level", "--log-format"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--fd", type=int)
    parser.add_argument("--at-first", action="store_true")
    return parser.parse_args()


def tell_of_loading(node: ThreadNode, options: argparse.Namespace) -> None:
    """Report progress, or readiness."""
    if options.mode == "loading":
        for done in range(11):
            node.send("supervisor", Progress(text="weights", done=done, total=10))
        return
    task = Task.EMBED if options.mode == "embed" else Task.GENERATE
    limits = ModelLimits(model="tiny", context_length=2048, vocab_size=9, max_total_tokens=65536, task=task)
    node.set_ready(Ready(limits=limits if node_role(options) is Role.SCHEDULER else None))


def node_role(options: argparse.Namespace) -> Role:
    return Role(options.peer.partition("-")[0])


def main() -> None:
    options = options_given()
    exit_with_parent(options.parent_fd, grace=0.5)
    if options.mode == "refuse":
        sys.stderr.write("tercet-scheduler: --dtype: no such dtype: float7\n")
        raise SystemExit(2)
    if options.mode == "crash":
        raise RuntimeError("the weights are torn")
    stopped = threading.Event()
    asked = itertools.count(1)

    def stop() -> None:
        if next(asked) == (2 if options.mode == "twice" else 1) and options.mode != "stubborn":
            stopped.set()

    on_signals([signal.SIGTERM], stop)
    misbehaves = options.mode in {"hang", "stuck", "die"} and is_first_start(options.once)
    phase, began = Phase.IDLE, time.monotonic()

    def status(_: str) -> Heartbeat:
        return Heartbeat(phase=phase, step_age=100 * (time.monotonic() - began))

    config = NodeConfig(node_role(options), options.peer, options.listen, supervisor=options.supervisor)
    node = ThreadNode(config, SupervisorInbox, status)
    node.start()
    while not any(isinstance(delivery.message, PeerUp) for delivery in node.drain(0.1)):
        pass
    tell_of_loading(node, options)
    sys.stdout.write(f"{options.peer} says hello{' at first' if options.at_first else ''}\n")
    sys.stdout.flush()
    if options.fd is not None:
        threading.Thread(target=answer, args=(options.fd,), daemon=True).start()
    if options.mode == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        options.once.write_text(str(child.pid))
    if options.mode == "leave":
        threading.Timer(0.3, stopped.set).start()  # the supervisor must have received Ready before
    if options.mode == "flood":
        threading.Thread(target=flood, daemon=True).start()
    if misbehaves:
        time.sleep(0.3)
        if options.mode == "stuck":
            phase = Phase.STEP
        else:
            os.kill(os.getpid(), signal.SIGSTOP if options.mode == "hang" else signal.SIGKILL)
    with contextlib.suppress(KeyboardInterrupt):
        stopped.wait()
    if options.mode == "twice":
        options.once.write_text("told twice")
    node.close("told to")


if __name__ == "__main__":
    main()
