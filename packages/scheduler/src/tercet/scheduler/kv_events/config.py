"""Configuration of KV events: the JSON of `--kv-events-config`, with the keys of vLLM and SGLang."""

from typing import Literal

import msgspec

from tercet.protocol.transport.replay_publisher import PublisherSettings

_WILDCARDS = ("://*:", "://0.0.0.0:", "://[::]:")


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the JSON object, with vLLM's defaults."""

    enable_kv_cache_events: bool | None = None
    """vLLM's switch."""
    publisher: Literal["null", "zmq"] | None = None
    """SGLang's switch."""
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    """Bind or connect; otherwise wildcards and ipc:// are bound, and other addresses connected."""
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000

    @property
    def enabled(self) -> bool:
        """Return whether events are published: one of the switches is on, and none is off."""
        if self.publisher is None:
            return bool(self.enable_kv_cache_events)
        return self.publisher == "zmq" and self.enable_kv_cache_events is not False

    def settings(self, rank: int) -> PublisherSettings:
        """Return addresses and limits. `rank` is added to the ports."""
        binds = self.endpoint.startswith("ipc://") or any(each in self.endpoint for each in _WILDCARDS)
        return PublisherSettings(
            endpoint=_shifted(self.endpoint, rank),
            bind=binds if self.bind is None else self.bind,
            replay_endpoint=self.replay_endpoint and _shifted(self.replay_endpoint, rank),
            topic=self.topic.encode(),
            buffer_steps=self.buffer_steps,
            hwm=self.hwm,
            max_queue_size=self.max_queue_size,
        )


def read_kv_events_config(text: str) -> KVEventsConfig:
    """Parse and check the JSON. Raises ValueError."""
    config = msgspec.json.decode(text, type=KVEventsConfig)
    for name in ("endpoint", "replay_endpoint"):
        address = getattr(config, name)
        if address is not None and not (address.startswith("ipc://") or _port(address)):
            raise ValueError(f"{name} must be tcp://HOST:PORT or ipc://PATH, not {address!r}")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if not 1 <= (number := getattr(config, name)) < 2**31:
            raise ValueError(f"{name} must be 1 to 2147483647, not {number}")
    return config


def _port(address: str) -> int:
    """Return the port of a tcp:// address, 0 for another address."""
    host, _, port = address.rpartition(":")
    return int(port) if host.startswith("tcp://") and len(host) > 6 and port.isdecimal() and int(port) < 2**16 else 0


def _shifted(address: str, rank: int) -> str:
    if rank == 0:
        return address
    if address.startswith("ipc://"):
        return f"{address}_dp{rank}"
    return f"{address.rpartition(':')[0]}:{_port(address) + rank}"
