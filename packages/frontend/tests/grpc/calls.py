"""A gRPC server beside a served engine, and clients of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.grpc.schema import SERVICE, message, methods
from tercet.frontend.grpc.server import GrpcServer
from tercet.frontend.testing import FakeEngine, Served, serving

METHODS = {each.name: each for each in methods()}


class Client:
    """Client of the service. `key` is sent as a bearer token."""

    def __init__(self, channel: Any, port: int, key: str = "") -> None:
        self.channel = channel
        self.port = port
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def call(self, name: str, request: Any = None) -> Any:
        """Call a method; that of Generate is a stream."""
        method = METHODS[name]
        make = self.channel.unary_stream if method.streams else self.channel.unary_unary
        made = make(
            f"/{SERVICE}/{name}",
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        return made(method.request() if request is None else request, metadata=self._metadata)

    async def refusal(self, name: str, request: Any = None) -> tuple[grpc.StatusCode, str]:
        """Return the status of a call that fails."""
        try:
            if METHODS[name].streams:
                async for _ in self.call(name, request):
                    pass
            else:
                await self.call(name, request)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"{name} succeeded")


@asynccontextmanager
async def grpc_serving(
    engine: FakeEngine, http: HttpConfig = HttpConfig(), *, connections: int = 128, **options: Any
) -> AsyncIterator[tuple[Served, Client]]:
    """Serve on 127.0.0.1 over HTTP and gRPC."""
    async with serving(engine, http, **options) as served:
        config = replace(http, grpc_listen="127.0.0.1:0")
        server = GrpcServer(served.manager, ChatPlanner(options.get("config", ServingConfig())), config, connections)
        await server.start()
        try:
            async with client(server.port) as opened:
                yield served, opened
        finally:
            await server.close()


@asynccontextmanager
async def client(port: int, key: str = "") -> AsyncIterator[Client]:
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield Client(channel, port, key)


def generate(ids: list[int], request_id: str = "", *, stream: bool = False, sampling: Any = None, **fields: Any) -> Any:
    """Return a request; `sampling` has sampling parameters."""
    params = {"temperature": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True}
    return message("GenerateRequest")(
        request_id=request_id,
        tokenized={"input_ids": ids},
        stream=stream,
        sampling_params={**params, **(sampling or {})},
        **fields,
    )
