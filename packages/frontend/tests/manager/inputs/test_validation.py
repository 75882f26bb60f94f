"""Early refusals, and the mapping of schedulers' rejections."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from tercet.frontend.errors import BadRequestError, ContextLengthExceededError, UnavailableError, from_rejection
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


@pytest.mark.parametrize(("count", "size", "status"), [(16, 256, 200), (16, 257, 400), (1, 1024, 200)])
async def test_stop_strings_are_bounded_in_all(
    engine_of: EngineOf, http_of: HttpOf, count: int, size: int, status: int
) -> None:
    stops = [f"{number:02}".ljust(size, "x") for number in range(count)]
    async with serving(engine_of()) as served:
        body = {"text": "hello", "sampling_params": {"stop": stops}}
        answer = await http_of(served).post("/generate", json=body)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "sampling_params.stop"
            assert served.engine.requests() == []


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
SCORED: dict[str, Any] = {"echo": True, "logprobs": 5, "max_tokens": 0}
NATIVE: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
PROMPTED: dict[str, Any] = {"messages": CHAT["messages"], "prompt_logprobs": 20}
LONG = {"role": "user", "content": "a b " * 500}
RESPONSE = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20}


async def refused(
    served: Served, http: httpx2.AsyncClient, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    """Expect a 400 that names the parameter, and no trace of the request."""
    answer = await http.post(path, json={"model": "tiny", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]
    assert served.engine.requests() == []
    assert served.manager.running == 0


@pytest.fixture
def roomy(limits: ModelLimits) -> ModelLimits:
    return msgspec.structs.replace(limits, context_length=262_144, max_total_tokens=262_144)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 128, "max_tokens": 1000}, "n"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 100_000}, "logprobs"),
        ("/v1/completions", {**SCORED, "prompt": [5] * 8192, "n": 128}, "n"),
        ("/v1/completions", {**SCORED, "prompt": [[5] * 8192] * 63}, "logprobs"),
        ("/v1/completions", {"prompt": "hi", "best_of": 20, "logprobs": 5, "max_tokens": 20_000}, "best_of"),
        ("/v1/chat/completions", {**PROMPTED, "max_tokens": 99_000, "messages": [LONG]}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5] * 1000, "n": 100, "prompt_logprobs": 20}, "n"),
        ("/v1/responses", {**RESPONSE, "max_output_tokens": 100_000}, "top_logprobs"),
        ("/generate", {**NATIVE, "input_ids": [5] * 8192, "sampling_params": {"n": 16}}, "sampling_params.n"),
        ("/generate", {**NATIVE, "input_ids": [[5] * 8192] * 16}, "return_logprob"),
    ],
)
async def test_more_log_probabilities_than_an_answer_can_show_are_refused(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        await refused(served, http_of(served), path, body, param, "At most 2097152")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"], "n": 128, "max_tokens": 32_769}, "n"),
        ("/v1/completions", {"prompt": "hi", "best_of": 20, "max_tokens": 230_000}, "best_of"),
        ("/v1/completions", {"prompt": ["hi"] * 50, "max_tokens": 100_000}, "max_tokens"),
        ("/generate", {"text": "hi", "sampling_params": {"n": 100, "max_new_tokens": 50_000}}, "sampling_params.n"),
    ],
)
async def test_more_tokens_than_one_request_may_ask_for_are_refused(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        await refused(served, http_of(served), path, body, param, "At most 4194304")


async def test_choices_of_no_given_length_share_what_one_request_may_ask_for(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        body = {"model": "tiny", "messages": CHAT["messages"], "n": 64}
        answer = await http_of(served).post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert [request.sampling.max_new_tokens for request in served.engine.requests()] == [4_194_304 // 64]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 8, "max_tokens": 4096}),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "n": 128, "max_tokens": 32_768}),
        ("/v1/completions", {**SCORED, "prompt": [5] * 8192}),
        ("/v1/completions", {"prompt": "hi", "best_of": 20, "max_tokens": 200_000}),
        ("/v1/completions", {"prompt": [5] * 8192, "echo": True, "n": 16, "max_tokens": 200_000}),
        ("/generate", {**NATIVE, "input_ids": [5] * 8192}),
        ("/generate", {**NATIVE, "logprob_start_len": -1, "input_ids": [5] * 8192, "sampling_params": {"n": 128}}),
    ],
)
async def test_what_people_ask_of_log_probabilities_is_answered(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits, path: str, body: dict[str, Any]
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        answer = await http_of(served).post(path, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text


async def test_a_default_length_is_bounded_by_the_limit_of_logprobs(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        http = http_of(served)
        for body in ({**CHAT, "n": 2}, {"messages": CHAT["messages"], "n": 2}):
            await http.post("/v1/chat/completions", json={"model": "tiny", **body})
        scored, plain = (request.sampling.max_new_tokens for request in served.engine.requests())
    assert scored == 2_097_152 // (2 * 21)
    assert plain > 262_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "<|im_end|>" * 900}]}, "messages"),
        ("/v1/completions", {"prompt": "a" * 9000}, "prompt"),
        ("/v1/completions", {"prompt": ["fine", "a" * 9000]}, "prompt[1]"),
        ("/v1/responses", {"input": "a" * 9000}, "input"),
        ("/generate", {"text": "a" * 9000}, "text"),
    ],
)
async def test_a_prompt_that_cannot_fit_is_refused_untokenized(
    engine_of: EngineOf,
    http_of: HttpOf,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    tokenized: list[int] = []
    encode = PromptTokenizer.encode

    def watched(self: PromptTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenized.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    async with serving(engine_of()) as served:
        monkeypatch.setattr(PromptTokenizer, "encode", watched)
        answer = await http_of(served).post(path, json={"model": "tiny", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "characters" in error["message"]
    assert all(size < 100 for size in tokenized)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "z" * 200}]}, "messages"),
        ("/v1/completions", {"prompt": "z" * 200}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 128}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 100, "max_tokens": 29}, "max_tokens"),
        ("/v1/responses", {"input": "z" * 200}, "input"),
        ("/v1/responses", {"input": "z" * 40, "max_output_tokens": 99}, "max_output_tokens"),
        ("/generate", {"text": "z" * 200}, "text"),
        ("/generate", {"input_ids": [5] * 128}, "input_ids"),
        (
            "/generate",
            {"input_ids": [5] * 100, "sampling_params": {"max_new_tokens": 29}},
            "sampling_params.max_new_tokens",
        ),
    ],
)
async def test_a_prompt_that_fills_the_context_is_refused_naming_its_field(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(path, json={"model": "tiny", **body})
        assert served.engine.requests() == []
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "maximum context length is 128 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "hi", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ("/v1/completions", {"prompt": "hi", "stop_token_ids": [99_999]}, "stop_token_ids"),
        (
            "/generate",
            {"text": "hi", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
            "sampling_params.min_new_tokens",
        ),
        (
            "/generate",
            {"text": "hi", "sampling_params": {"stop_token_ids": [99_999]}},
            "sampling_params.stop_token_ids",
        ),
        ("/generate", {"text": "hi", "sampling_params": {"logit_bias": {"99999": 1}}}, "sampling_params.logit_bias"),
    ],
)
async def test_values_beyond_the_models_limits_are_refused_naming_their_field(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(path, json={"model": "tiny", **body})
        assert served.engine.requests() == []
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_ids_that_there_are_not_are_refused_by_the_name_they_came_under(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        http = http_of(served)
        told = [
            (await http.post("/generate", json={"input_ids": [99999]})).json()["error"]["param"],
            (await http.post("/v1/completions", json={"model": "tiny", "prompt": [99999]})).json()["error"]["param"],
        ]
    assert told == ["input_ids", "prompt"]


async def test_what_marks_add_to_a_prompt_does_not_count(engine_of: EngineOf, http_of: HttpOf) -> None:
    """150 control tokens in a client's text grow to 9,000 characters before tokenization."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "<|im_end|>" * 150}]}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "characters" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("code", ["overloaded", "draining"])
def test_refusals_for_now_are_503_and_say_when_to_come_back(code: str) -> None:
    error = from_rejection(code, "m")
    assert isinstance(error, UnavailableError)
    assert (error.status, error.code, error.headers()) == (503, code, {"retry-after": "1"})


@pytest.mark.parametrize("code", ["invalid_request", "invalid_token_ids", "rate_limit_exceeded", "server_error"])
def test_other_refusals_are_the_requests_fault(code: str) -> None:
    error = from_rejection(code, "m")
    assert type(error) is BadRequestError
    assert (error.status, error.code, error.headers()) == (400, code, {})


def test_a_request_that_is_too_long_for_its_scheduler_is_told_so() -> None:
    assert isinstance(from_rejection("context_length_exceeded", "m"), ContextLengthExceededError)


async def test_an_answer_is_shorter_by_what_the_prompt_shows(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={"model": "tiny", **PROMPTED})
        assert answer.status_code == 200, answer.text
        [request] = served.engine.requests()
    assert request.sampling.max_new_tokens == 2_097_152 // 21 - answer.json()["usage"]["prompt_tokens"]
