"""Documentation of the routes about the server itself."""

from tercet.frontend.api.docs.openapi import MethodAndPath, Operation

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
            "load": _SCHEDULER_LOAD,
        }
    ],
    "detokenizers": [
        {"peer": "detokenizer-0", "incarnation": "1", "ready": True, "phase": "step", "choices": 1},
    ],
}

SERVER: dict[MethodAndPath, Operation] = {
    ("GET", "/server_info"): Operation(
        tag="Operation",
        summary="Get the models, limits, and the load of every part.",
        answer="Information on the server.",
        response=_SERVER,
    ),
    ("GET", "/health"): Operation(
        tag="Operation",
        summary="Report whether requests can be served now. Needs no key.",
        answer="Requests can be served.",
        response={"status": "ok"},
    ),
    ("GET", "/live"): Operation(
        tag="Operation",
        summary="Report that this process is alive. Needs no key.",
        answer="The process is alive.",
        response={"status": "ok"},
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
