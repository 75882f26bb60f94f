"""SGLang's endpoints about the server: its models, its load, and probes."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.__about__ import __version__
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.errors import BadRequestError, RateLimitError, UnavailableError
from tercet.frontend.http.json_response import json_response
from tercet.frontend.http.query import number
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import cancel_on_disconnect, first_of
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.embedding_request import EmbeddingRequest, TokenInput
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.peers import SchedulerPeer
from tercet.protocol.messages.values import WIRE_VERSION, Task

_PROBE_SECONDS = 20.0
_PROGRESS_INTERVAL = 0.25
_LOAD_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
"""Names that /v1/loads takes in `include`. Only `core` has numbers here."""


class InfoRoutes:
    """Endpoints that report on models, schedulers and detokenizers."""

    def __init__(self, manager: TokenizerManager, planner: ChatPlanner) -> None:
        self._manager = manager
        self._planner = planner

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route("GET", path, self.server_info) for path in ("/server_info", "/get_server_info")),
            *(Route("GET", path, self.model_info) for path in ("/model_info", "/get_model_info")),
            *(Route("GET", path, self.weight_version) for path in ("/weight_version", "/get_weight_version")),
            Route("GET", "/v1/loads", self.loads),
            Route("GET", "/get_load", self.load),
            Route("GET", "/health", self.health),
            Route("GET", "/health_generate", self.health_generate),
            Route("GET", "/live", self.live),
        ]

    async def server_info(self, request: Request) -> Response:  # noqa: ARG002
        """Return the models with their limits, and the load of every scheduler and detokenizer."""
        manager = self._manager
        fleet, counters = manager.fleet, manager.counters
        info = {
            "version": __version__,
            "wire_version": list(WIRE_VERSION),
            "frontend": manager.peer,
            "ready": manager.ready,
            "requests_running": manager.running,
            "requests_waiting": manager.waiting,
            "requests_ended": counters.outcomes,
            "requests_over_limit": counters.over_limit,
            "requests_resumed_and_finished": counters.resumed_finished,
            "redispatches": counters.redispatches,
            "deaths": counters.deaths,
            "models": [_describe(model) for model in manager.models],
            "schedulers": [
                {
                    "peer": each.peer,
                    "incarnation": each.incarnation,
                    "ready": each.ready,
                    "phase": each.heartbeat.phase,
                    "model": each.limits.model if each.limits else None,
                    "encoder": each.encoder is not None,
                    "load": {name: getattr(each.load, name) for name in each.load.__struct_fields__},
                }
                for each in fleet.schedulers.values()
            ],
            "detokenizers": [
                {
                    "peer": each.peer,
                    "incarnation": each.incarnation,
                    "ready": each.ready,
                    "phase": each.heartbeat.phase,
                    "choices": each.load.running,
                }
                for each in fleet.detokenizers.values()
            ],
        }
        # The counters have enumerations as keys.
        return Response(orjson.dumps(info, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Return 200, or 503 while draining or while no scheduler or no detokenizer is ready."""
        self._check_ready()
        return json_response({"status": "ok"})

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        """Return 200 while the process runs."""
        return json_response({"status": "ok"})

    async def model_info(self, request: Request) -> Response:
        """Return the first model, or the one that the query names, in SGLang's format."""
        model = await self._manager.adapters.model_or_first(request.query_params.get("model"))
        names = self._planner.parsers(model)
        return json_response(
            {
                "model_path": model.identity.weights_path or model.identity.path or model.name,
                "served_model_name": model.name,
                "tokenizer_path": model.identity.path or model.name,
                "is_generation": model.limits.task is Task.GENERATE,
                "preferred_sampling_params": None,
                "weight_version": self._manager.weights.version(model.identity.weights),
                "reasoning_parser": names.reasoning,
                "tool_call_parser": names.tools,
                "disaggregation_mode": "null",
                "has_image_understanding": model.limits.images is not None,
                "has_audio_understanding": (model.limits.audio or model.limits.sounds) is not None,
            }
        )

    async def weight_version(self, request: Request) -> Response:
        """Return the version of the first model's weights, or of the model that the query names."""
        model = await self._manager.adapters.model_or_first(request.query_params.get("model"))
        return json_response({"weight_version": self._manager.weights.version(model.identity.weights)})

    async def loads(self, request: Request) -> Response:
        """Return the load of every scheduler, or of one, in SGLang's format."""
        if request.query_params.get("format", "json") != "json":
            raise BadRequestError("'format' is 'json'; /metrics has the format of Prometheus.", param="format")
        sections = request.query_params.get("include", "all").split(",")
        if not _LOAD_SECTIONS.issuperset(map(str.strip, sections)):
            raise BadRequestError(f"'include' has some of {', '.join(sorted(_LOAD_SECTIONS))}.", param="include")
        chosen = number(request, "dp_rank", -1, lowest=0, highest=2**31 - 1)
        loads = [core_load(rank, each) for rank, each in enumerate(self._schedulers()) if chosen in (-1, rank)]
        head = {"timestamp": datetime.now(UTC).isoformat(), "version": __version__}
        return json_response({**head, "loads": loads})

    async def load(self, request: Request) -> Response:  # noqa: ARG002
        """Return the number of requests and tokens of every scheduler."""
        return json_response(
            [
                {
                    "dp_rank": rank,
                    "num_reqs": each.load.running + each.load.queued,
                    "num_waiting_reqs": each.load.queued,
                    "num_tokens": each.load.running_tokens + each.load.queued_tokens,
                }
                for rank, each in enumerate(self._schedulers())
            ]
        )

    async def health_generate(self, request: Request) -> Response:
        """Return 200 once every model has computed a token, or some scheduler has, and 503 after a while."""
        self._check_ready()
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await cancel_on_disconnect(request, first_of(self._probe_all(), self._progress()))
        except TimeoutError:
            raise UnavailableError(f"No token was computed within {_PROBE_SECONDS:g} s.", retry_after=1) from None
        return json_response({"status": "ok"})

    async def _probe_all(self) -> None:
        """Probe one model after the other. Where the caller's quota is used up, others of its requests run."""
        try:
            for model in self._manager.models:
                await self._probe(model)
        except RateLimitError:
            await asyncio.Event().wait()

    async def _probe(self, model: ServedModel) -> None:
        """Let a model compute one token, or one vector. Raises ApiError."""
        if model.limits.task is not Task.GENERATE:
            await self._manager.embed(EmbeddingRequest(model=model.name, inputs=[TokenInput([0])], params=["input"]))
            return
        options = GenerationOptions(max_tokens=1)
        generation = await self._manager.submit(
            [GenerateRequest(model=model.name, prompt=TokenPrompt([0]), options=options)]
        )
        try:
            await anext(generation.arrivals())
        finally:
            self._manager.release(generation)

    async def _progress(self) -> None:
        """Wait until some scheduler has computed tokens: a probe may wait behind other requests."""
        computed = self._computed()
        while self._computed() <= computed:  # noqa: ASYNC110
            await asyncio.sleep(_PROGRESS_INTERVAL)

    def _computed(self) -> int:
        return sum(each.load.prompt_tokens + each.load.output_tokens for each in self._schedulers())

    def _schedulers(self) -> list[SchedulerPeer]:
        """Return the schedulers by name; the place of each is its rank."""
        return [each for _, each in sorted(self._manager.fleet.schedulers.items())]

    def _check_ready(self) -> None:
        """Raise UnavailableError while draining or while no scheduler or no detokenizer is ready."""
        if self._manager.draining:
            raise UnavailableError("The server is about to leave.", retry_after=1)
        if not self._manager.ready:
            raise UnavailableError("No scheduler or no detokenizer is ready.", retry_after=1)


def core_load(rank: int, scheduler: SchedulerPeer) -> dict[str, Any]:
    """Return the load of a scheduler under SGLang's names."""
    load = scheduler.load
    used = load.pages_used * load.page_size
    most = load.pages_total * load.page_size
    total = load.running_tokens + load.queued_tokens
    return {
        "timestamp": time.time(),
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.queued,
        "num_used_tokens": used,
        "num_total_tokens": total,
        "num_active_tokens": total,
        "max_total_num_tokens": most,
        "max_running_requests": load.slots_total,
        "token_usage": round(used / most, 4) if most else 0.0,
        "cache_hit_rate": round(load.cached_prompt_tokens / load.prompt_tokens, 4) if load.prompt_tokens else 0.0,
        "utilization": round(load.running / load.slots_total, 4) if load.slots_total else 0.0,
        "total_prefill_uncached_tokens": load.prompt_tokens - load.cached_prompt_tokens,
    }


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "context_length": model.limits.context_length,
        "max_total_tokens": model.limits.max_total_tokens,
        "vocab_size": model.limits.vocab_size,
        "weights": model.identity.weights,
        "grammars": model.limits.grammars or None,
        "max_loras": model.limits.max_loras,
        "has_chat_template": model.files.template is not None,
    }
