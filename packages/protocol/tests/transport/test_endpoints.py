"""Addresses are checked before a socket sees them, and specs mean what exists right now."""

import socket
from pathlib import Path

import pytest

from tercet.protocol.errors import AddressError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.endpoints import (
    Ipc,
    Tcp,
    bind_address,
    check_dialable,
    check_peer_id,
    check_spec,
    default_peer,
    parse,
    resolve,
)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("ipc:///run/t/a.ipc", Ipc("/run/t/a.ipc")),
        ("tcp://127.0.0.1:5000", Tcp("127.0.0.1", 5000)),
        ("tcp://[::1]:5000", Tcp("::1", 5000)),
        ("tcp://scheduler.svc:0", Tcp("scheduler.svc", 0)),
    ],
)
def test_addresses_are_parsed(address: str, expected: Ipc | Tcp) -> None:
    assert parse(address) == expected
    assert isinstance(expected, Ipc) or str(expected) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ipc://relative/path",
        "ipc://",
        "ipc:///a\0b",
        "inproc://x",
        "tcp://*:5000",
        "tcp://host",
        "tcp://host:99999",
        "tcp://host:5000/x",
        "tcp://:5000",
        "tcp://a;b:1",
        "udp://127.0.0.1:1",
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match=r"ipc|port"):
        parse(address)


def test_a_path_too_long_for_a_socket_is_refused_with_its_limit() -> None:
    longest = "/" + "d" * 106
    assert parse(f"ipc://{longest}") == Ipc(longest)
    with pytest.raises(AddressError, match="107 bytes"):
        parse(f"ipc://{longest}d")
    with pytest.raises(AddressError, match="107 bytes"):
        parse("ipc:///" + "é" * 60)
    with pytest.raises(AddressError, match="107 bytes"):
        bind_address("ipc:///" + "d" * 80, "frontend-0", "0" * 16)


@pytest.mark.parametrize("address", ["tcp://10.0.0.3:5000", "tcp://0.0.0.0:0", "tcp://[::]:1", "tcp://example.org:1"])
def test_tcp_stays_on_loopback(address: str) -> None:
    with pytest.raises(AddressError, match="loopback"):
        check_spec(address)
    with pytest.raises(AddressError, match="loopback"):
        bind_address(address, "frontend-0", "0" * 16)


@pytest.mark.parametrize("address", ["ipc:///run/scheduler-*", "tcp://127.0.0.1:0"])
def test_only_one_address_can_be_dialled(address: str) -> None:
    with pytest.raises(AddressError):
        check_dialable(address)


@pytest.mark.parametrize("peer", ["", "a/b", "..", ".hidden", "a b", "x" * 65, "a\n", "é"])
def test_a_peer_id_is_fit_for_a_file_name(peer: str) -> None:
    with pytest.raises(AddressError, match="peer id"):
        check_peer_id(peer)


def test_an_inbox_has_a_path_of_its_own() -> None:
    assert bind_address("ipc:///run/t/", "frontend-0", "ab" * 8) == "ipc:///run/t/frontend-0.abababababababab.ipc"
    assert bind_address("tcp://127.0.0.1:0", "frontend-0", "ab" * 8) == "tcp://127.0.0.1:0"
    with pytest.raises(AddressError, match="one directory"):
        bind_address("ipc:///run/*", "frontend-0", "ab" * 8)


def test_a_pattern_stands_for_the_sockets_there_are(tmp_path: Path) -> None:
    spec = f"ipc://{tmp_path}/scheduler-*"
    assert resolve(spec) == set()
    for name in ("scheduler-0.aa.ipc", "scheduler-1.bb.ipc", "scheduler-notes.txt", "frontend-0.cc.ipc"):
        (tmp_path / name).touch()
    assert resolve(spec) == {f"ipc://{tmp_path}/scheduler-0.aa.ipc", f"ipc://{tmp_path}/scheduler-1.bb.ipc"}
    assert resolve(f"ipc://{tmp_path}/absent.ipc") == {f"ipc://{tmp_path}/absent.ipc"}


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tcp://127.0.0.1:5000" in resolve("tcp://localhost:5000")
    assert resolve("tcp://127.0.0.9:5000") == {"tcp://127.0.0.9:5000"}
    found = [(0, 0, 0, "", (host, 5000)) for host in ("10.0.0.1", "10.0.0.2", "fd00::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("tcp://schedulers:5000") == {"tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000", "tcp://[fd00::1]:5000"}


def test_a_name_that_does_not_resolve_stands_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert resolve("tcp://nowhere:5000") == set()


@pytest.mark.parametrize("host", ["vm", "scheduler-6c8f7d9b5-x2kqz", "a" * 60 + "one", "häuschen_3"])
def test_an_id_by_default_names_role_and_host_and_is_allowed(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    peer = default_peer(Role.DETOKENIZER)
    assert check_peer_id(peer) == peer
    assert peer.startswith("detokenizer-")
    assert peer.endswith(host[-3:])
