"""SGLang's scheduler service: requests of token ids, answered by the same manager as those of HTTP."""

import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext
from starlette.datastructures import Headers

from tercet.frontend.__about__ import __version__
from tercet.frontend.api.generation_response import collect
from tercet.frontend.api.openai.embeddings import model_for_task
from tercet.frontend.api.sglang.client_ids import ClientId, ClientIds
from tercet.frontend.api.sglang.info_routes import core_load
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.errors import ApiError, BadRequestError, UnavailableError
from tercet.frontend.grpc.conversion import ChoiceOutput, generate_request, native_request
from tercet.frontend.grpc.schema import SERVICE, Method, message, methods
from tercet.frontend.http.auth import Keys, current_caller, set_current_caller
from tercet.frontend.manager.embedding_state import unpack_vector
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.embedding_request import EmbeddingRequest, Input, TokenInput
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import Task

logger = logging.getLogger(__name__)

STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""Status codes by those of HTTP; others are INTERNAL."""
_SAME_LOADS = (
    *("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage"),
    *("cache_hit_rate", "utilization", "max_running_requests", "dp_rank"),
)
_LONGEST_ID = 512
_OPEN = {"HealthCheck"}
"""Methods without authentication."""


class SchedulerService:
    """Methods of the service. A request without a stream is answered when all its choices have ended."""

    def __init__(self, manager: TokenizerManager, planner: ChatPlanner, keys: Keys) -> None:
        self._manager = manager
        self._planner = planner
        self._keys = keys
        self._ids = ClientIds()
        self._started_at = time.time()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all methods, for a server."""
        handlers = {each.name: self._method_handler(each) for each in methods()}
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _method_handler(self, method: Method) -> grpc.RpcMethodHandler:
        serialize = method.response.SerializeToString
        if method.streams:
            return grpc.unary_stream_rpc_method_handler(partial(self._generate, method), response_serializer=serialize)
        behaviors: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "Embed": self._embed,
            "HealthCheck": self._health_check,
            "Abort": self._abort,
            "GetModelInfo": self._model_info,
            "GetServerInfo": self._server_info,
            "GetLoads": self._loads,
        }
        behavior = behaviors[method.name]

        async def answer(data: bytes, context: ServicerContext) -> Any:
            request = await self._read(method, data, context)
            try:
                return await behavior(request)
            except ApiError as error:
                await abort_with(context, error)
            except Exception:
                await _abort_failed(context)

        return grpc.unary_unary_rpc_method_handler(answer, response_serializer=serialize)

    async def _read(self, method: Method, data: bytes, context: ServicerContext) -> Any:
        """Authenticate the caller, then parse the message. End the call if one of them fails."""
        if method.name not in _OPEN:
            await self._authenticate(context)
        try:
            return method.request.FromString(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The message cannot be parsed.")

    async def _generate(self, method: Method, data: bytes, context: ServicerContext) -> AsyncIterator[Any]:
        """Yield the chunks and the end of each choice. A client that cancels the call aborts the request."""
        request = await self._read(method, data, context)
        try:
            generation, known = await self._submit(request)
        except ApiError as error:
            await abort_with(context, error)
        except Exception:
            await _abort_failed(context)
        request_id = generation.states[0].rid if known is None else known.chosen
        try:
            responses = _stream(generation, request_id) if request.stream else _whole(generation, request_id)
            async for response in responses:
                yield response
        except ApiError as error:
            await abort_with(context, error)
        except Exception:
            await _abort_failed(context)
        finally:
            self._manager.release(generation)

    async def _authenticate(self, context: ServicerContext) -> None:
        """Set the caller of the current task from the call's metadata, or end the call."""
        metadata = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in metadata]
        caller = self._keys.authenticate(Headers(raw=raw))
        if caller is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "Give an API key as 'authorization: Bearer KEY'.")
        else:
            set_current_caller(caller)

    async def _submit(self, request: Any) -> tuple[Generation, ClientId | None]:
        """Start a request. Return it with its client's id, which can be found while it is held. Raises ApiError."""
        if len(request.request_id) > _LONGEST_ID:
            raise BadRequestError(f"'request_id' has more than {_LONGEST_ID} characters.", param="request_id")
        model = await self._model(request.lora_id or None)
        body = native_request(request, model.context)
        owner = current_caller().owner
        work = await self._manager.requests.turns.run(owner, generate_request(body, model))
        rid = self._manager.new_id()
        known = self._ids.add(owner, request.request_id, rid) if request.request_id else None
        return await self._manager.submit(work, rid), known

    async def _model(self, adapter: str | None) -> ServedModel:
        model = await self._manager.adapters.model_or_first(adapter)
        if adapter is not None and model.lora is None:
            raise BadRequestError(f"{adapter!r} is a model, not an adapter.", param="lora_id")
        return model

    async def _embed(self, request: Any) -> Any:
        """Return the vector of an input, or the scores of a classifier."""
        name = (await self._manager.adapters.model_or_first(None)).name
        model = await model_for_task(self._manager, name, Task.EMBED, Task.CLASSIFY)
        if request.HasField("mm_inputs") or request.is_cross_encoder:
            raise BadRequestError("Inputs are token ids alone.", param="tokenized")
        if not 0 < len(request.tokenized.input_ids) <= model.context:
            raise BadRequestError(f"An input has 1 to {model.context} tokens.", param="tokenized.input_ids")
        inputs: list[Input] = [TokenInput(list(request.tokenized.input_ids))]
        batch = await self._manager.embed(EmbeddingRequest(model=name, inputs=inputs, params=["tokenized.input_ids"]))
        (state,) = batch.states
        vector = unpack_vector(state.vector)
        return message("EmbedResponse")(embedding=vector, embedding_dim=len(vector), prompt_tokens=state.prompt_tokens)

    async def _health_check(self, request: Any) -> Any:  # noqa: ARG002
        healthy = self.healthy
        return message("HealthCheckResponse")(
            healthy=healthy, message="" if healthy else "the server does not accept new requests"
        )

    @property
    def healthy(self) -> bool:
        """Return whether new requests are accepted."""
        return self._manager.ready and not self._manager.draining

    async def _abort(self, request: Any) -> Any:
        rid = self._ids.find(current_caller().owner, request.request_id)
        if rid is None:
            return message("AbortResponse")(success=False, message="No request has this id.")
        self._manager.requests.abort(rid)
        return message("AbortResponse")(success=True)

    async def _model_info(self, request: Any) -> Any:  # noqa: ARG002
        model = await self._model(None)
        labels = dict(enumerate(model.limits.labels))
        return message("GetModelInfoResponse")(
            model_path=model.identity.weights_path or model.identity.path or model.name,
            tokenizer_path=model.identity.path or model.name,
            served_model_name=model.name,
            is_generation=model.limits.task is Task.GENERATE,
            weight_version=self._manager.weights.version(model.identity.weights),
            max_context_length=model.context,
            max_req_input_len=model.context,
            vocab_size=model.limits.vocab_size,
            eos_token_ids=model.limits.eos_token_ids,
            id2label_json=json.dumps(labels) if labels else "",
            num_labels=len(labels),
        )

    async def _server_info(self, request: Any) -> Any:  # noqa: ARG002
        model = await self._model(None)
        loads = [each["max_running_requests"] for each in self._core_loads()]
        names = self._planner.parsers(model)
        tokens = model.limits.max_total_tokens
        info = message("GetServerInfoResponse")(
            active_requests=self._manager.running,
            uptime_seconds=time.time() - self._started_at,
            sglang_version=f"tercet-{__version__}",
            server_type="grpc",
            max_total_num_tokens=tokens,
        )
        info.server_args.update(
            {
                "model_path": model.identity.path or model.name,
                "tokenizer_path": model.identity.path or model.name,
                "served_model_name": model.name,
                "dp_size": len(loads),
                "max_running_requests": sum(loads),
                "tool_call_parser": names.tools,
                "reasoning_parser": names.reasoning,
            }
        )
        info.scheduler_info.update({"max_total_num_tokens": tokens, "max_req_input_len": model.context})
        info.start_time.FromSeconds(int(self._started_at))
        return info

    async def _loads(self, request: Any) -> Any:
        loads = self._core_loads()
        chosen = [each for each in loads if not request.HasField("dp_rank") or each["dp_rank"] == request.dp_rank]
        return message("GetLoadsResponse")(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(loads),
            loads=[
                message("SchedulerLoad")(
                    num_total_reqs=each["num_running_reqs"] + each["num_waiting_reqs"],
                    **{name: each[name] for name in _SAME_LOADS},
                )
                for each in chosen
            ],
        )

    def _core_loads(self) -> list[dict[str, Any]]:
        schedulers = sorted(self._manager.fleet.schedulers.items())
        return [core_load(rank, each) for rank, (_, each) in enumerate(schedulers)]


async def abort_with(context: ServicerContext, error: ApiError) -> None:
    """End a call with the status of an error. A time to retry is in the trailing metadata. Raises AbortError."""
    code = STATUS_CODES.get(error.status, grpc.StatusCode.INTERNAL)
    metadata = tuple(error.headers().items())
    message_of = error.message if error.param is None else f"{error.message} (parameter: {error.param})"
    await context.abort(code, message_of, metadata)


async def _abort_failed(context: ServicerContext) -> None:
    """End a call whose handling raised, without the exception's text. Raises AbortError."""
    logger.exception("gRPC call failed")
    await context.abort(grpc.StatusCode.INTERNAL, "The server failed this request.")


async def _stream(generation: Generation, request_id: str) -> AsyncIterator[Any]:
    (state,) = generation.states
    outputs = [ChoiceOutput(request_id, state, choice.index) for choice in state.choices]
    async for arrivals in generation.arrivals():
        for update in (arrival.update for arrival in arrivals):
            output = outputs[update.index]
            if update.token_ids:
                yield output.chunk(update.token_ids, update.logprobs)
            if update.finish is not None:
                yield output.complete(update.finish)


async def _whole(generation: Generation, request_id: str) -> AsyncIterator[Any]:
    for choice in await collect(generation, generation.arrivals()):
        if choice.finish is None:
            raise UnavailableError("The request ended without an answer.")
        output = ChoiceOutput(request_id, choice.state, choice.index)
        output.add(choice.token_ids, choice.logprobs)
        yield output.complete(choice.finish)
