"""Resolver: specs are resolved repeatedly, and a slow name server delays no caller."""

import socket
import threading
from pathlib import Path

import pytest

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.endpoints import RESOLVE_INTERVAL, Resolver


def test_files_are_looked_at_twice_a_second(tmp_path: Path) -> None:
    resolver = Resolver({f"ipc://{tmp_path}/scheduler-*": None, "tcp://127.0.0.1:5000": Role.DETOKENIZER})
    assert resolver.poll(0.0) == {"tcp://127.0.0.1:5000": Role.DETOKENIZER}
    (tmp_path / "scheduler-0.aa.ipc").touch()
    assert resolver.poll(0.9 * RESOLVE_INTERVAL) is None
    assert resolver.poll(RESOLVE_INTERVAL) == {
        "tcp://127.0.0.1:5000": Role.DETOKENIZER,
        f"ipc://{tmp_path}/scheduler-0.aa.ipc": None,
    }
    (tmp_path / "scheduler-0.aa.ipc").unlink()
    assert resolver.poll(2 * RESOLVE_INTERVAL) == {"tcp://127.0.0.1:5000": Role.DETOKENIZER}


def test_a_slow_name_server_does_not_hold_up_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asked = threading.Event(), threading.Semaphore(0)

    def look_up(*_: object, **__: object) -> list[object]:
        asked.release()
        answer.wait(10)
        return [(0, 0, 0, "", ("127.0.0.7", 1))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    resolver = Resolver({"tcp://localhost:1": Role.SCHEDULER, "tcp://127.0.0.1:2": Role.DETOKENIZER})
    assert resolver.poll(0.0) == {"tcp://127.0.0.1:2": Role.DETOKENIZER}
    assert asked.acquire(timeout=10)
    assert resolver.poll(1.0) == {"tcp://127.0.0.1:2": Role.DETOKENIZER}
    assert not asked.acquire(blocking=False), "one question at a time"
    answer.set()
    assert resolver._thread
    resolver._thread.join(10)
    assert resolver.poll(2.0) == {"tcp://127.0.0.1:2": Role.DETOKENIZER, "tcp://127.0.0.7:1": Role.SCHEDULER}
    resolver._thread.join(10)
