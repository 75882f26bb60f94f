"""Another host's side of the link to host 0: one session, from the request to join to the loss of host 0."""

import logging
import os
import time
from collections.abc import Callable, Iterator

import zmq

from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import Frame
from tercet.protocol.transport.channel import Connection, Context
from tercet.protocol.transport.endpoints import Tcp
from tercet.protocol.transport.poller import Poller
from tercet.scheduler.executor.ranks.host_messages import (
    Alive,
    Begin,
    Fits,
    FromHost0,
    Join,
    Model,
    Refused,
    ToHost0,
    decode_from_host_0,
    encode,
)
from tercet.scheduler.executor.ranks.host_network import HostNetwork, HostsError, local_address, software
from tercet.scheduler.executor.ranks.liveness import INTERVAL, SilenceTimer

logger = logging.getLogger(__name__)

_JOIN_INTERVAL = 1.0
"""Seconds between two requests to join, which end with `Begin`: host 0 repeats what was lost."""
ATTEMPT = 5.0
"""Seconds in which host 0 must answer. A connection that a broken network holds up is then begun anew."""


class LostError(Exception):
    """The session is over: host 0 does not answer, has ended, or is cut off. The message says which."""


class HostLink:
    """A session with host 0. It belongs to one thread, except for `wake`."""

    def __init__(self, network: HostNetwork, host: int) -> None:
        """Open the sockets. Raise AddressError if host 0's name is unknown or there is no route to it."""
        self._network = network
        self.session = os.urandom(8).hex()
        first = network.resolve()
        self.address = local_address(first)
        """Address of this host."""
        self._context: Context = zmq.Context()
        self._inbox = network.listen(self._context, str(Tcp(self.address, 0)))
        self._outbox = network.dial(self._context, str(first))
        self._poller = Poller(self._inbox.filenos())
        self.wake = self._poller.wake
        self._join = Join(session=self.session, host=host, address=self._inbox.address, software=software())
        self._timer = SilenceTimer(time.monotonic())
        self._sent = self._asked = 0.0
        self._answered = self._begun = False

    def join(self) -> Model:
        """Ask host 0 to join, and return its model. Raise LostError, or HostsError if it refuses this host."""
        end = time.monotonic() + ATTEMPT
        while time.monotonic() < end:
            for message in self._answers():
                if isinstance(message, Model):
                    self.send(Alive(session=self.session, loading=True))  # the caller reads files before it goes on
                    return message
        raise LostError("it does not answer")

    def wait_for_begin(self, model: Model) -> Begin:
        """Report that this host has the model, and wait until all hosts have joined.

        Raise LostError, also if host 0 has another model by now, and HostsError if it refuses this host.
        """
        self.send(Fits(session=self.session))
        while True:
            for message in self._answers():
                if isinstance(message, Begin):
                    self._begun = True
                    return message
                if isinstance(message, Model):
                    if message != model:
                        raise LostError("it has started again with another model")
                    self.send(Fits(session=self.session))

    def _answers(self) -> Iterator[FromHost0]:
        for message, _ in self.receive():
            if isinstance(message, Refused):
                raise HostsError(f"host 0 refuses this host: {message.reason}")
            yield message

    def receive(self, until: Callable[[], bool] = lambda: False) -> Iterator[tuple[FromHost0, Frame]]:
        """Wait for messages of host 0, at most until the next heartbeat is due, and yield each with its second frame.

        Raise LostError if host 0 has ended or is silent.
        """
        self._poller.wait(0 if until() else max(0.0, self._sent + INTERVAL - time.monotonic()))
        self._inbox.admit()
        while (received := self._inbox.receive()) is not None:
            if not self._network.admits(received) or not received.frames:
                continue
            try:
                message = decode_from_host_0(received.frames[0])
            except DecodeError as error:
                logger.warning("a message is dropped: %s", error)
                continue
            if message.session == self.session:
                self._answered = True
                if isinstance(message, Alive):
                    self._timer.heard(time.monotonic(), loading=message.loading)
                yield message, received.frames[-1]
        self._watch()

    def send(self, message: ToHost0) -> bool:
        """Send a message to host 0. Return False if there is no connection."""
        return self._outbox.send([encode(message)])

    def close(self) -> None:
        """Close the sockets; a last message gets a second."""
        self._outbox.close(linger=1)
        self._inbox.close()
        self._poller.close()
        self._context.term()

    def _watch(self) -> None:
        now = time.monotonic()
        change = self._outbox.connection_change()
        if change is Connection.FAILED:
            raise HostsError(f"host 0 at {self._network.address} has other keys, or is no host of a model")
        if change is Connection.LOST and self._answered:
            raise LostError("it has ended")
        if self._timer.expired(now):
            raise LostError("it is silent")
        if now - self._sent >= INTERVAL:
            self._sent = now
            self.send(Alive(session=self.session, loading=False))
        if not self._begun and now - self._asked >= _JOIN_INTERVAL and self.send(self._join):
            self._asked = now
