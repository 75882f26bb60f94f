"""Rejections by schedulers name the client's parameter, like those of the frontend."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from packages.frontend.tests import encoders
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, Token, serving
from tercet.protocol.messages.messages import Rejected, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits, Task, unpack_ints

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
Refusal = Callable[[TokenizedGenerateReqInput | TokenizedEmbeddingReqInput], Rejected]

MESSAGES = [{"role": "user", "content": "hello"}]


def refusing(code: str, *, retry: bool = False) -> Refusal:
    return lambda request: Rejected(rid=request.rid, attempt=request.attempt, code=code, message="no", retry=retry)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


async def ask(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, str, str | None]:
    """Return status, code and parameter."""
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 9}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "hello"}, "prompt"),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 9}, "max_tokens"),
        ("/v1/responses", {"input": "hello"}, "input"),
        ("/generate", {"text": "hello"}, "text"),
        ("/generate", {"input_ids": [5]}, "input_ids"),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 9}}, "sampling_params.max_new_tokens"),
    ],
)
async def test_what_is_too_long_for_a_scheduler_is_named(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of(reject=refusing("context_length_exceeded"))) as served:
        told = await ask(http_of(served), path, {"model": "tiny", **body})
    assert told == (400, "context_length_exceeded", param)


async def test_a_prompt_too_long_for_the_scheduler_is_named_for_any_max_tokens(
    engine_of: EngineOf, http_of: HttpOf, limits: ModelLimits
) -> None:
    engine = engine_of(reject=refusing("context_length_exceeded"))
    async with serving(engine) as served:
        engine.limits = msgspec.structs.replace(limits, max_total_tokens=8)
        engine.scheduler_up("scheduler-0")
        body = {"model": "tiny", "max_tokens": 4}
        told = [await ask(http_of(served), "/v1/completions", {**body, "prompt": [5] * size}) for size in (7, 8)]
    assert [param for _, _, param in told] == ["max_tokens", "prompt"]


async def test_a_grammar_that_fails_in_mid_generation_is_a_bad_request(engine_of: EngineOf, http_of: HttpOf) -> None:
    """Clients retry a 500, which would be of no use."""
    failed = FinishReason(FinishType.ERROR, message="it cannot be followed", code="invalid_grammar")
    async with serving(engine_of(lambda _request, _index: [Token(10, "{", failed)])) as served:
        body = {"model": "tiny", "messages": MESSAGES, "response_format": SCHEMA}
        told = await ask(http_of(served), "/v1/chat/completions", body)
    assert told == (400, "invalid_grammar", "response_format.json_schema.schema")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "response_format": SCHEMA, "stream": True},
            "response_format.json_schema.schema",
        ),
        ("/v1/completions", {"prompt": "hello", "guided_regex": "a"}, "guided_regex"),
        ("/generate", {"text": "hello", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ],
)
async def test_a_grammar_that_no_scheduler_reads_is_a_400_once_all_were_asked(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    engine = engine_of(reject=refusing("invalid_grammar", retry=True), schedulers=["scheduler-0", "scheduler-1"])
    async with serving(engine) as served:
        told = await ask(http_of(served), path, {"model": "tiny", **body})
        asked = {peer for peer, message in engine.sent if isinstance(message, TokenizedGenerateReqInput)}
    assert told == (400, "invalid_grammar", param)
    assert asked == {"scheduler-0", "scheduler-1"}


@pytest.mark.parametrize(
    ("code", "param"),
    [("invalid_token_ids", "input_ids"), ("invalid_request", None), ("overloaded", None)],
)
async def test_other_refusals_name_what_they_are_about(
    engine_of: EngineOf, http_of: HttpOf, code: str, param: str | None
) -> None:
    async with serving(engine_of(reject=refusing(code))) as served:
        told = await ask(http_of(served), "/generate", {"input_ids": [5]})
    assert told[1:] == (code, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "the cat sat"}, "input"),
        ("/v1/embeddings", {"input": ["cat", "the cat sat"]}, "input[1]"),
        ("/v1/rerank", {"query": "cat", "documents": ["dog", "the cat sat"]}, "documents[1]"),
        ("/v1/score", {"text_1": "the cat sat", "text_2": "dog"}, "text_1"),
        ("/v1/classify", {"input": "the cat sat"}, "input"),
    ],
)
async def test_the_input_that_is_too_long_is_named(
    http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    def of_three_tokens(request: TokenizedEmbeddingReqInput) -> Rejected | None:
        too_long = len(unpack_ints(request.input_ids)) > 3
        return refusing("context_length_exceeded")(request) if too_long else None

    task = Task.CLASSIFY if "classify" in path else Task.EMBED
    limits = encoders.limits(task, ("bad", "good") if task is Task.CLASSIFY else ())
    engine = EncodingEngine(lambda _request, _index: [], encoders.files(), limits, refuse=of_three_tokens)
    async with serving(engine) as served:
        told = await ask(http_of(served), path, {"model": "encoder", **body})
    assert told == (400, "context_length_exceeded", param)
