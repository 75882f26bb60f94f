"""Hosts of one model meet, or say in one line why not, and the loss of one is noticed."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.channel import Connection
from tercet.protocol.transport.keys import write_keys
from tercet.protocol.transport.security import Security
from tercet.scheduler.config import ConfigError, HostOptions, ModelOptions, ProcessOptions
from tercet.scheduler.executor.rank_strategy import RankError
from tercet.scheduler.executor.ranks import host_link, liveness
from tercet.scheduler.executor.ranks.host_link import HostLink, LostError
from tercet.scheduler.executor.ranks.host_messages import (
    Begin,
    Ended,
    Fits,
    Forward,
    Join,
    Listening,
    Model,
    Unfit,
    decode_from_host_0,
    decode_to_host_0,
    encode,
)
from tercet.scheduler.executor.ranks.host_network import HostNetwork, HostsError
from tercet.scheduler.executor.ranks.host_process import HostProcess
from tercet.scheduler.executor.ranks.hosts import Hosts
from tercet.scheduler.executor.ranks.liveness import LOADING_SILENCE, SILENCE, SilenceTimer
from tercet.scheduler.executor.ranks.ranks import ranks_of_host
from tercet.scheduler.executor.ranks.rendezvous import interface_of

MODEL = Model(session="", options=b"{}", device="cpu", fingerprint="f", count=1, shards=2, stages=1)
LIMIT = 10.0


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    place = tmp_path_factory.mktemp("keys")
    write_keys(place)
    return Security.load(place / "scheduler", Role.SCHEDULER)


@pytest.fixture
def network(security: Security) -> HostNetwork:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return HostNetwork(hosts=2, address=f"tcp://127.0.0.1:{port}", timeout=LIMIT, security=security)


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def hosts(network: HostNetwork, lost: list[str]) -> Iterator[Hosts]:
    hosts = Hosts(network, MODEL, lost.append)
    yield hosts
    hosts.end()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def send_many(hosts: Hosts) -> None:
    """Send until the connection is seen to be broken, or the queue is full."""
    for _ in range(100_000):
        hosts.send(b"order")


def lose_first(kind: type, sender: object, name: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Lose the first message of a kind that a method sends. Return a list that it is appended to."""
    lost: list[object] = []
    send = getattr(sender, name)

    def lossy(*arguments: object) -> object:
        if isinstance(arguments[-1], kind) and not lost:
            lost.append(arguments[-1])
            return False
        return send(*arguments)

    monkeypatch.setattr(sender, name, lossy)
    return lost


def begins(hosts: Hosts) -> threading.Thread:
    """Let host 0 begin once all have joined, in a thread: hosts report again until then."""

    def work() -> None:
        hosts.wait_for_joins()
        hosts.begin("127.0.0.1:1")

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def joined(hosts: Hosts, link: HostLink) -> None:
    """Let both go on until the ranks of the other host listen."""
    model = link.join()
    assert model.fingerprint == "f"
    begun = begins(hosts)
    assert link.wait_for_begin(model) == Begin(session=link.session, store="127.0.0.1:1")
    begun.join()
    link.send(Listening(session=link.session))
    hosts.wait_for_all()


def test_orders_reach_a_host_that_has_joined(hosts: Hosts, network: HostNetwork, lost: list[str]) -> None:
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
        hosts.send(b"first")
        hosts.send(b"second")
        orders: list[bytes] = []
        while len(orders) < 2:
            orders += [bytes(frame) for message, frame in link.receive() if isinstance(message, Forward)]
        assert orders == [b"first", b"second"]
        assert not lost
        hosts.end()
        with pytest.raises(LostError, match="it has ended"):
            until(lambda: not [*link.receive()] and False)


def test_a_host_that_closes_its_link_is_lost(hosts: Hosts, network: HostNetwork, lost: list[str]) -> None:
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
    until(lambda: bool(lost))
    assert "host 1 of this model is lost, shutting down all ranks: its connection is broken" in lost[0]
    with pytest.raises(RankError, match="host 1 takes no more orders"):
        send_many(hosts)


def test_the_end_of_a_rank_is_the_loss_of_its_host(hosts: Hosts, network: HostNetwork, lost: list[str]) -> None:
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
        link.send(Ended(session=link.session, rank=1, reason="killed by SIGKILL"))
        until(lambda: bool(lost))
    assert lost[0].endswith("rank 1 of this model ended there: killed by SIGKILL")


def test_a_silent_host_is_lost(
    hosts: Hosts, network: HostNetwork, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
        end = time.monotonic() + 3 * liveness.INTERVAL
        while time.monotonic() < end:
            [*link.receive()]
        assert not lost
        monkeypatch.setattr(liveness, "SILENCE", 0.6)
        [*link.receive()]
        until(lambda: bool(lost))
    assert lost[0].endswith("it is silent")


@pytest.mark.parametrize("begun", [False, True])
def test_a_host_that_starts_again_joins_again(
    hosts: Hosts, network: HostNetwork, lost: list[str], *, begun: bool
) -> None:
    with closing(HostLink(network, 1)) as before, closing(HostLink(network, 1)) as link:
        if begun:
            joined(hosts, before)
            until(lambda: link.send(link._join))
            until(lambda: bool(lost))
            assert lost[0].endswith("it has started again")
        else:
            before.join()
            before.send(Fits(session=before.session))
            joined(hosts, link)
            assert not lost


def test_a_host_may_read_its_files_for_long(
    hosts: Hosts, network: HostNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "SILENCE", 0.3)
    with closing(HostLink(network, 1)) as link:
        model = link.join()
        time.sleep(1.0)
        assert hosts._hosts[1].session == link.session
        begun = begins(hosts)
        assert link.wait_for_begin(model)
        begun.join()


def test_a_host_joins_if_its_report_is_lost(
    hosts: Hosts, network: HostNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(HostLink(network, 1)) as link:
        lost = lose_first(Fits, link, "send", monkeypatch)
        joined(hosts, link)
    assert len(lost) == 1


def test_a_host_joins_if_the_answer_is_lost(
    hosts: Hosts, network: HostNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_first(Model, hosts, "_send", monkeypatch)
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
    assert len(lost) == 1


def test_a_host_that_was_silent_joins_in_the_same_session(
    hosts: Hosts, network: HostNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(HostLink(network, 1)) as link, monkeypatch.context() as patch:
        patch.setattr(liveness, "SILENCE", 0.6)
        model = link.join()
        [*link.receive()]
        until(lambda: "host 1 is gone before all have joined: it is silent" in caplog.text)
        patch.undo()
        begun = begins(hosts)
        assert link.wait_for_begin(model).session == link.session
        begun.join()


def test_host_0_that_has_changed_its_model_is_another(hosts: Hosts, network: HostNetwork) -> None:
    """The host does not see the connection break, because it reads its files meanwhile."""
    with closing(HostLink(network, 1)) as link:
        model = link.join()
        hosts.end()
        other = Hosts(network, msgspec.structs.replace(MODEL, fingerprint="g"), lambda _: None)
        until(lambda: link._outbox.connection_change() is Connection.UP)
        with pytest.raises(LostError, match="it has started again with another model"):
            link.wait_for_begin(model)
        other.end()


def test_a_stranger_does_not_disturb_orders(hosts: Hosts, network: HostNetwork) -> None:
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
        link.send(Join(session="other", host=2, address="tcp://127.0.0.1:1", software="any"))
        until(lambda: 2 in hosts._hosts)
        hosts.send(b"order")
        hosts.wait_for_all()


def test_another_version_is_refused(
    hosts: Hosts, network: HostNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_link, "software", lambda: "tercet-scheduler 0.0, torch 1.0")
    with (
        closing(HostLink(network, 1)) as link,
        pytest.raises(HostsError, match=r"host 0 refuses this host: it runs tercet-scheduler 0\.0, torch 1\.0, and"),
    ):
        link.join()
    assert "host 1 is refused: it runs tercet-scheduler 0.0" in caplog.text
    assert hosts._missing() == [1]


def test_a_number_beyond_the_hosts_is_refused(hosts: Hosts, network: HostNetwork) -> None:
    with closing(HostLink(network, 2)) as link, pytest.raises(HostsError, match="--node-rank 2: host 0 has --nnodes 2"):
        link.join()
    assert hosts._missing() == [1]


def test_a_host_with_other_weights_leaves(hosts: Hosts, network: HostNetwork, caplog: pytest.LogCaptureFixture) -> None:
    with closing(HostLink(network, 1)) as link:
        link.join()
        link.send(Unfit(session=link.session, reason="/model differs from the model of host 0"))
        until(lambda: "host 1 is refused: /model differs" in caplog.text)
    assert hosts._missing() == [1]


def test_holders_of_other_keys_do_not_join(hosts: Hosts, network: HostNetwork, tmp_path: Path) -> None:
    write_keys(tmp_path)
    other = replace(network, security=Security.load(tmp_path / "scheduler", Role.SCHEDULER))
    with closing(HostLink(other, 1)) as link, pytest.raises((LostError, HostsError)):
        link.join()
    assert not hosts._hosts


def test_other_roles_do_not_join(hosts: Hosts, network: HostNetwork, tmp_path: Path, security: Security) -> None:
    """A frontend's key opens the inbox, as it does with all inboxes, and its messages are dropped."""
    write_keys(tmp_path)
    frontend = Security.load(tmp_path / "frontend", Role.FRONTEND)
    publics = {**frontend.publics, Role.SCHEDULER: security.public}
    hosts._network.security.publics[Role.FRONTEND] = frontend.public  # type: ignore[index, union-attr]
    other = replace(network, security=replace(frontend, publics=publics))
    with closing(HostLink(other, 1)) as link, pytest.raises(LostError, match="it does not answer"):
        link.join()
    assert not hosts._hosts


def test_hosts_that_do_not_meet_say_so(network: HostNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(replace(network, timeout=0.5), MODEL, lambda _: None)
    address = network.address.removeprefix("tcp://")
    words = (
        rf"host 1 of 2 has not joined at {network.address} within 0\.5 s: run `tercet serve MODEL --node-rank 1 "
        f"--dist-init-addr {address}` there, with the same keys"
    )
    with pytest.raises(HostsError, match=words):
        hosts.wait_for_joins()
    hosts.end()
    monkeypatch.setattr(host_link, "ATTEMPT", 0.5)
    with closing(HostLink(network, 1)) as link, pytest.raises(LostError, match="it does not answer"):
        link.join()


def test_the_address_is_one_of_host_0(network: HostNetwork) -> None:
    with pytest.raises(HostsError, match=r"--dist-init-addr: cannot listen on tcp://192\.0\.2\.1:5000.*of its own"):
        Hosts(replace(network, address="tcp://192.0.2.1:5000"), MODEL, lambda _: None)


@pytest.mark.parametrize(
    ("address", "loopback", "words"),
    [
        ("10.0.0.1:5000", True, "tcp:// without keys is for loopback only"),
        ("10.0.0.1:5000", False, "tcp:// needs keys"),
        ("127.0.0.1:5000", False, "or --insecure-loopback where no other user is"),
        ("127.0.0.1", True, "neither ipc:///absolute/path nor tcp://host:port"),
    ],
)
def test_links_without_keys_are_refused(address: str, loopback: bool, words: str) -> None:
    process = ProcessOptions(insecure_loopback=loopback)
    with pytest.raises(ConfigError, match=words) as raised:
        HostNetwork.of(process, HostOptions(nnodes=2, dist_init_addr=address))
    assert str(raised.value).startswith(f"--dist-init-addr {address}: ")


def test_an_address_that_cannot_be_dialled_is_refused(tmp_path: Path) -> None:
    write_keys(tmp_path)
    process = ProcessOptions(keys=tmp_path / "scheduler")
    for address in ("0.0.0.0:5000", "10.0.0.1:0"):
        with pytest.raises(ConfigError, match="give an address and a port of host 0"):
            HostNetwork.of(process, HostOptions(node_rank=1, dist_init_addr=address))
    assert HostNetwork.of(process, HostOptions()) is None
    given = HostNetwork.of(process, HostOptions(nnodes=3, dist_init_addr="[::1]:5000", dist_timeout=7))
    assert given is not None
    assert (given.hosts, given.timeout, str(given.resolve())) == (3, 7, "tcp://[::1]:5000")


@pytest.mark.parametrize("options", [HostOptions(nnodes=2), HostOptions(node_rank=1)])
def test_several_hosts_need_an_address(options: HostOptions) -> None:
    with pytest.raises(ConfigError, match="--nnodes and --node-rank need --dist-init-addr HOST:PORT"):
        HostNetwork.of(ProcessOptions(), options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 2, "node_rank": 2, "dist_init_addr": "a:1"}, "--node-rank must be 0 to 1 with --nnodes 2, not 2"),
        ({"nnodes": 0}, "--nnodes must be 1 to 64, not 0"),
        ({"dist_init_addr": "a:1"}, "needs --nnodes above 1, or a --node-rank"),
        ({"dist_timeout": 0.0}, "--dist-timeout must be"),
    ],
)
def test_options_of_hosts_that_cannot_work_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HostOptions(**options)  # type: ignore[arg-type]


def test_hosts_run_equal_numbers_of_ranks() -> None:
    assert ranks_of_host(8, 2) == 4
    for size in (3, 1):
        with pytest.raises(ValueError, match=rf"{size} processes cannot be split evenly over --nnodes 2"):
            ranks_of_host(size, 2)


def test_garbage_is_no_message(hosts: Hosts, network: HostNetwork) -> None:
    for decode in (decode_to_host_0, decode_from_host_0):
        with pytest.raises(DecodeError, match="not a message"):
            decode(b"garbage")
        with pytest.raises(DecodeError):
            decode(encode(MODEL)[:-1])
    with closing(HostLink(network, 1)) as link:
        until(lambda: link._outbox.send([b"garbage"]))
        assert link.join().shards == 2, "it goes on after garbage"
    assert hosts._thread.is_alive()


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


def test_silence_is_death_unless_the_listener_slept() -> None:
    timer = SilenceTimer(0.0)
    step = liveness.INTERVAL
    now = 0.0

    def wait(seconds: float) -> bool:
        nonlocal now
        end, expired = now + seconds, False
        while now < end:
            now += step
            expired = timer.expired(now)
        return expired

    assert not wait(LOADING_SILENCE - step)
    timer.heard(now, loading=True)
    assert not wait(SILENCE + step)
    timer.heard(now, loading=False)
    assert not wait(SILENCE)
    now += 100.0
    assert not timer.expired(now)
    assert wait(step)


def test_a_link_wakes_for_another_thread(hosts: Hosts, network: HostNetwork) -> None:
    with closing(HostLink(network, 1)) as link:
        joined(hosts, link)
        [*link.receive()]
        threading.Timer(0.01, link.wake).start()
        began = time.monotonic()
        [*link.receive(lambda: False)]
        assert time.monotonic() - began < liveness.INTERVAL


def test_a_host_that_never_reaches_host_0_says_so(
    network: HostNetwork, directory: Path, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_link, "ATTEMPT", 0.1)
    process = ProcessOptions(listen=f"ipc://{directory}")
    model, hosts = ModelOptions(model=str(checkpoints("llama"))), HostOptions(node_rank=1)
    words = (
        rf"host 0 was not reached at {network.address} within 0\.3 s: run `tercet serve MODEL --nnodes N --node-rank 0 "
        f"--dist-init-addr {network.address.removeprefix('tcp://')}` there, with the same keys"
    )
    with pytest.raises(HostsError, match=words):
        HostProcess(process, model, hosts, replace(network, timeout=0.3)).run()
