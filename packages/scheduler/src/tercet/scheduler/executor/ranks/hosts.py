"""Host 0's side of the links to the other hosts of a model: waits for them, sends orders, and watches them."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec
import zmq

from tercet.protocol.errors import ChannelError, DecodeError
from tercet.protocol.transport.channel import Connection, Context, Outbox, Received
from tercet.protocol.transport.poller import Poller
from tercet.scheduler.executor.rank_strategy import RankError
from tercet.scheduler.executor.ranks.host_messages import (
    Alive,
    Begin,
    Ended,
    Fits,
    Forward,
    FromHost0,
    Join,
    Listening,
    Model,
    Refused,
    ToHost0,
    Unfit,
    decode_to_host_0,
    encode,
)
from tercet.scheduler.executor.ranks.host_network import HostNetwork, HostsError, software
from tercet.scheduler.executor.ranks.liveness import INTERVAL, SilenceTimer

logger = logging.getLogger(__name__)

_REPORT_INTERVAL = 10.0
"""Seconds between two log lines while this host waits for others."""

OnLost = Callable[[str], None]
"""Callback, in a thread: the reason why the hosts cannot go on together."""


@dataclass(eq=False)
class _Host:
    """Another host that has asked to join. It belongs to the thread of `Hosts`, except for `outbox.send`."""

    number: int
    session: str
    outbox: Outbox
    timer: SilenceTimer
    refusal: str
    fits: bool = False
    listens: bool = False


class Hosts:
    """The other hosts of the model, and a thread that no collective blocks. It owns the sockets."""

    def __init__(self, network: HostNetwork, model: Model, on_lost: OnLost) -> None:
        """Listen for hosts that have the same `model`. Raise HostsError if the address is not one of this host.

        `on_lost` is called if a host is lost after all have joined.
        """
        self._network = network
        self._model = model
        self._on_lost = on_lost
        self._software = software()
        self._hosts: dict[int, _Host] = {}
        self._changed = threading.Condition()
        self._begun = self._loaded = self._closing = False
        target = network.resolve()
        self.address = target.host
        """Address of this host."""
        self._context: Context = zmq.Context()
        try:
            self._inbox = network.listen(self._context, str(target))
        except ChannelError as error:
            self._context.term()
            raise HostsError(f"--dist-init-addr: {error}: host 0 needs an address of its own there") from error
        self._poller = Poller(self._inbox.filenos())
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def wait_for_joins(self) -> None:
        """Wait until all hosts have joined with the same model. Raise HostsError if one has not in time."""
        began = reported = time.monotonic()
        logger.info("waiting for the other hosts: address=%s hosts=%s", self._network.address, self._missing())
        with self._changed:
            while missing := self._missing():
                now = time.monotonic()
                if now - began > self._network.timeout:
                    raise HostsError(self._late(missing))
                if now - reported > _REPORT_INTERVAL:
                    reported = now
                    logger.info("still waiting for hosts: hosts=%s seconds=%.0f", missing, now - began)
                self._changed.wait(INTERVAL)
            self._begun = True
        logger.info("all hosts have joined: hosts=%d", self._network.hosts)

    def begin(self, store: str) -> None:
        """Let every other host start its ranks, which meet at the store."""
        for host in self._members():
            self._send(host, Begin(session=host.session, store=store))

    def wait_for_all(self) -> None:
        """Wait until the ranks of all hosts listen for orders."""
        with self._changed:
            self._changed.wait_for(lambda: all(host.listens for host in self._members()))
            self._loaded = True

    def send(self, frame: bytes) -> None:
        """Send an encoded order to all hosts. Raise RankError if one is gone or too far behind."""
        for host in self._members():
            if not host.outbox.send([encode(Forward(session=host.session)), frame]):
                raise RankError(f"host {host.number} takes no more orders")

    def end(self) -> None:
        """Close the links: the other hosts end their ranks, and wait for this host. Further calls have no effect."""
        self._closing = True
        self._poller.wake()
        self._thread.join()

    def _members(self) -> list[_Host]:
        """Return the hosts that have joined, once all have: others may ask to join, too, until they are refused."""
        return [self._hosts[number] for number in range(1, self._network.hosts)]

    def _missing(self) -> list[int]:
        return [number for number in range(1, self._network.hosts) if not self._fits(number)]

    def _fits(self, number: int) -> bool:
        host = self._hosts.get(number)
        return host is not None and host.fits

    def _late(self, missing: list[int]) -> str:
        network = self._network
        return (
            f"host {missing[0]} of {network.hosts} has not joined at {network.address} within {network.timeout:g} s: "
            f"run `tercet serve MODEL --node-rank {missing[0]} --dist-init-addr "
            f"{network.address.removeprefix('tcp://')}` there, with the same keys"
        )

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            logger.critical("the links to other hosts failed, ending this process", exc_info=True)
            os._exit(1)

    def _serve(self) -> None:
        sent = 0.0
        while not self._closing:
            self._poller.wait(max(0.0, sent + INTERVAL - time.monotonic()))
            self._inbox.admit()
            while (received := self._inbox.receive()) is not None:
                self._receive(received)
            now = time.monotonic()
            if now - sent >= INTERVAL:
                sent = now
                for host in list(self._hosts.values()):
                    self._send(host, Alive(session=host.session, loading=not self._loaded))
            with self._changed:
                for host in list(self._hosts.values()):
                    self._check(host, now)
        for host in self._hosts.values():
            host.outbox.close()
        self._inbox.close()
        self._poller.close()
        self._context.term()

    def _receive(self, received: Received) -> None:
        if not self._network.admits(received) or not received.frames:
            return
        try:
            message = decode_to_host_0(received.frames[0])
        except DecodeError as error:
            logger.warning("a message is dropped: %s", error)
            return
        host = next((each for each in self._hosts.values() if each.session == message.session), None)
        with self._changed:
            if isinstance(message, Join):
                self._join(message, host)
            elif host is not None:
                self._handle(host, message)
            self._changed.notify()

    def _join(self, join: Join, host: _Host | None) -> None:
        if host is not None:  # it repeats itself, because an answer may be lost
            if not host.refusal and not host.fits:
                self._answer(host)
            return
        if (before := self._hosts.get(join.host)) is not None:
            self._lose(before, "it has started again")
            if self._begun:
                return
        outbox = self._network.dial(self._context, join.address)
        timer = SilenceTimer(time.monotonic())
        self._hosts[join.host] = _Host(join.host, join.session, outbox, timer, self._refusal(join))

    def _refusal(self, join: Join) -> str:
        """Return why a host cannot take part; empty if it can."""
        if not 0 < join.host < self._network.hosts:
            return f"--node-rank {join.host}: host 0 has --nnodes {self._network.hosts}"
        if join.software != self._software:
            return f"it runs {join.software}, and host 0 {self._software}: install the same versions"
        return ""

    def _handle(self, host: _Host, message: ToHost0) -> None:
        match message:
            case Alive(loading=loading):
                host.timer.heard(time.monotonic(), loading=loading)
            case Fits():
                if not host.fits:
                    logger.info("host %d has joined", host.number)
                host.fits = True
            case Unfit(reason=reason):
                logger.error("host %d is refused: %s", host.number, reason)
                self._remove(host)
            case Listening():
                host.listens = True
            case Ended(rank=rank, reason=reason):
                self._lose(host, f"rank {rank} of this model ended there: {reason}")
            case Join():
                raise AssertionError("handled before")
            case _:
                assert_never(message)

    def _check(self, host: _Host, now: float) -> None:
        """Notice a host that is connected, cut off or silent."""
        change = host.outbox.connection_change()
        if change is Connection.UP:
            self._answer(host)
        elif change is not None:
            self._lose(host, "its connection is broken")
        elif host.timer.expired(now):
            self._lose(host, "it is silent")

    def _answer(self, host: _Host) -> None:
        if not host.refusal:
            self._send(host, msgspec.structs.replace(self._model, session=host.session))
            return
        logger.error("host %d is refused: %s", host.number, host.refusal)
        self._send(host, Refused(session=host.session, reason=host.refusal))
        self._remove(host)

    def _send(self, host: _Host, message: FromHost0) -> None:
        host.outbox.send([encode(message)])

    def _remove(self, host: _Host) -> None:
        if self._hosts.get(host.number) is host:
            del self._hosts[host.number]
        host.outbox.close(linger=1)

    def _lose(self, host: _Host, reason: str) -> None:
        if self._closing:
            return
        if self._begun:
            self._on_lost(f"host {host.number} of this model is lost, shutting down all ranks: {reason}")
            return
        logger.warning("host %d is gone before all have joined: %s", host.number, reason)
        self._remove(host)
