"""Documentation of the routes about the server itself."""

from tercet.frontend.api.docs.openapi import MethodAndPath, Operation, QueryParameter

_SCHEDULER_LOAD = {
    "queued": 0,
    "running": 1,
    "queued_tokens": 0,
    "running_tokens": 40,
    "pages_total": 4096,
    "pages_free": 4000,
    "pages_cached": 56,
    "page_size": 16,
    "slots_total": 64,
    "slots_free": 63,
    "retractions": 0,
    "cached_prompt_tokens": 8,
    "prompt_tokens": 14,
    "output_tokens": 3,
    "updating": False,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
    "released": [],
}
_SERVER = {
    "version": "0.1.0",
    "wire_version": [1, 1],
    "frontend": "frontend-0",
    "ready": True,
    "requests_running": 1,
    "requests_waiting": 0,
    "requests_ended": {"finished": 12},
    "requests_over_limit": 0,
    "requests_resumed_and_finished": 0,
    "redispatches": {},
    "deaths": {},
    "models": [
        {
            "name": "embedded",
            "context_length": 2048,
            "max_total_tokens": 65536,
            "vocab_size": 4096,
            "weights": "0123456789abcdef",
            "grammars": "llguidance 1.9.1",
            "max_loras": 8,
            "has_chat_template": True,
        }
    ],
    "schedulers": [
        {
            "peer": "scheduler-0",
            "incarnation": "1",
            "ready": True,
            "phase": "step",
            "model": "embedded",
            "encoder": False,
            "load": _SCHEDULER_LOAD,
        }
    ],
    "detokenizers": [
        {"peer": "detokenizer-0", "incarnation": "1", "ready": True, "phase": "step", "choices": 1},
    ],
}
_STATUS = {
    "at": 1700000000.5,
    "everything": True,
    "frontend": {"peer": "frontend-0", "running": 1, "waiting": 0, "ended": {"finished": 12}, "recovered": 0},
    "deaths": {},
    "redispatches": {},
    "models": [{"name": "embedded", "context_length": 2048}],
    "schedulers": [
        {
            "peer": "scheduler-0",
            "incarnation": "1",
            "model": "embedded",
            "state": "ready",
            "phase": "step",
            "steps": 17,
            "step_age": 0.01,
            "step_seconds": 0.2,
            "encoder": False,
            "load": _SCHEDULER_LOAD,
            "choices": [
                {
                    "id": "0123456789",
                    "index": 0,
                    "attempt": 0,
                    "tenant": "",
                    "phase": "decode",
                    "age": 0.5,
                    "prompt_tokens": 37,
                    "cached_tokens": 32,
                    "computed_tokens": 39,
                    "output_tokens": 3,
                    "max_new_tokens": 128,
                    "pages": 3,
                    "shared_pages": 2,
                    "constrained": False,
                    "lora": False,
                }
            ],
            "prefixes": [{"parent": -1, "pages": 2, "users": 1, "children": 0}],
        }
    ],
    "detokenizers": [{"peer": "detokenizer-0", "incarnation": "1", "state": "ready", "choices": 1}],
    "events": [{"number": 1, "at": 1700000000.0, "kind": "ready", "peer": "scheduler-0", "role": "scheduler"}],
}


def _probe(summary: str, answer: str) -> Operation:
    return Operation(tag="Operation", summary=summary, answer=answer, response={"status": "ok"})


def _html(summary: str) -> Operation:
    return Operation(
        tag="Page", summary=summary, answer="An HTML document.", media_type="text/html", response="<!doctype html>"
    )


_SERVER_INFO = Operation(
    tag="Operation",
    summary="Get the models, limits, and the load of every part.",
    answer="Information on the server.",
    response=_SERVER,
)
_MODEL = QueryParameter("model", {"type": "string"}, "The model; the first one by default.")
_MODEL_INFO = Operation(
    tag="Operation",
    summary="Get the paths, parsers and weight version of a model. SGLang's format.",
    answer="Information on the model.",
    query=[_MODEL],
    response={
        "model_path": "/models/embedded",
        "served_model_name": "embedded",
        "tokenizer_path": "/models/embedded",
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "0123456789abcdef",
        "reasoning_parser": None,
        "tool_call_parser": "generic",
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    },
)
_WEIGHT_VERSION = Operation(
    tag="Operation",
    summary="Get the version of a model's weights: the name given to them, or their fingerprint.",
    answer="The version.",
    query=[_MODEL],
    response={"weight_version": "step-700"},
)

SERVER: dict[MethodAndPath, Operation] = {
    **{("GET", path): _SERVER_INFO for path in ("/server_info", "/get_server_info")},
    **{("GET", path): _MODEL_INFO for path in ("/model_info", "/get_model_info")},
    **{("GET", path): _WEIGHT_VERSION for path in ("/weight_version", "/get_weight_version")},
    ("GET", "/v1/loads"): Operation(
        tag="Operation",
        summary="Get the load of every scheduler. SGLang's format.",
        answer="The loads, by rank.",
        query=[
            QueryParameter("dp_rank", {"type": "integer"}, "Rank of one scheduler."),
            QueryParameter("include", {"type": "string"}, "Sections with a comma between; only `core` has numbers."),
            QueryParameter("format", {"const": "json"}, "The format."),
        ],
        response={
            "timestamp": "2026-11-27T04:00:00.000000+00:00",
            "version": "0.1.0",
            "loads": [
                {
                    "timestamp": 1795752000.5,
                    "dp_rank": 0,
                    "num_running_reqs": 1,
                    "num_waiting_reqs": 0,
                    "num_used_tokens": 640,
                    "num_total_tokens": 40,
                    "max_total_num_tokens": 65536,
                    "max_running_requests": 64,
                    "token_usage": 0.0098,
                    "cache_hit_rate": 0.5714,
                    "utilization": 0.0156,
                    "num_active_tokens": 640,
                    "total_prefill_uncached_tokens": 6,
                }
            ],
        },
    ),
    ("GET", "/get_load"): Operation(
        tag="Operation",
        summary="Get the number of requests and tokens of every scheduler. SGLang's older format.",
        answer="The loads, by rank.",
        response=[{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 40}],
    ),
    ("GET", "/health_generate"): _probe(
        summary="Report whether tokens are computed, by one of each model if nothing else runs.",
        answer="Tokens are computed.",
    ),
    ("GET", "/health"): _probe(
        summary="Report whether requests can be served now. Needs no key.",
        answer="Requests can be served.",
    ),
    ("GET", "/live"): _probe(
        summary="Report that this process is alive. Needs no key.",
        answer="The process is alive.",
    ),
    ("GET", "/metrics"): Operation(
        tag="Operation",
        summary="Get the metrics for Prometheus.",
        answer="Prometheus' text format.",
        media_type="text/plain",
        response="# HELP tercet_requests_waiting Requests that no part takes.\n"
        "# TYPE tercet_requests_waiting gauge\n"
        'tercet_requests_waiting{frontend="frontend-0"} 0\n',
    ),
    ("GET", "/status/stream"): Operation(
        tag="Operation",
        summary="Get the status of all parts, their requests and the prefix cache, twice a second.",
        answer="Server-sent events; the data of each is an object like the example.",
        media_type="text/event-stream",
        response=_STATUS,
    ),
    ("GET", "/"): _html("Get the page with a chat and a live view of the server. Needs no key."),
    ("GET", "/docs"): _html("Get the page that documents this API. Needs no key."),
    ("GET", "/page/{name}"): Operation(
        tag="Page",
        summary="Get a script or style of the pages. Needs no key.",
        answer="A script or style.",
        media_type="text/javascript",
        response="export const answer = 42;",
    ),
    ("GET", "/openapi.json"): Operation(
        tag="Operation",
        summary="Get this document.",
        answer="An OpenAPI 3.1 document.",
        response={
            "openapi": "3.1.0",
            "info": {"title": "Tercet", "version": "0.1.0", "description": "Open language models."},
            "security": [{"bearer": []}],
            "paths": {},
            "components": {"securitySchemes": {}, "schemas": {}},
        },
    ),
}
