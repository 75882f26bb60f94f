"""Fakes of the scheduler's ports, and a driver that runs the core like the loop."""

from tercet.scheduler.testing.driver import Driver, request
from tercet.scheduler.testing.fake_encoder import FakeEncoder, embedding_request
from tercet.scheduler.testing.fake_executor import Done, FakeExecutor, StaleCacheError, small_capacity

__all__ = [
    "Done",
    "Driver",
    "FakeEncoder",
    "FakeExecutor",
    "StaleCacheError",
    "embedding_request",
    "request",
    "small_capacity",
]
