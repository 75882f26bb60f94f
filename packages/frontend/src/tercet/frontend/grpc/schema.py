"""Messages of SGLang's scheduler service, made of the compiled schema."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SERVICE = "sglang.grpc.scheduler.SglangScheduler"


class Method(NamedTuple):
    """Method of the service, with the classes of its messages."""

    name: str
    request: Any
    response: Any
    streams: bool
    """The response is a stream."""


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    content = files(__package__).joinpath("sglang_scheduler.binpb").read_bytes()
    for file in FileDescriptorSet.FromString(content).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _pool()


def message(name: str) -> Callable[..., Any]:
    """Return the class of a message of the service's package."""
    made: Callable[..., Any] = GetMessageClass(POOL.FindMessageTypeByName(f"sglang.grpc.scheduler.{name}"))
    return made


def methods() -> list[Method]:
    """Return the methods of the service."""
    return [
        Method(each.name, GetMessageClass(each.input_type), GetMessageClass(each.output_type), each.server_streaming)
        for each in POOL.FindServiceByName(SERVICE).methods
    ]
