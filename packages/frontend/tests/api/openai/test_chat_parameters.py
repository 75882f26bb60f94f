"""Parameters of /v1/chat/completions: known, bounded, and passed on or refused by name. Names state the rule."""

from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.testing import FakeEngine, Served, decode_spec, serving

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER}
WITH_SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
WITH_IMAGES: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    ],
}


async def test_rule_17_every_documented_parameter_is_known() -> None:
    documented = {*CompletionCreateParamsBase.__annotations__, "stream"}
    assert documented <= ChatRequest.model_fields.keys()


async def test_a_request_names_one_of_the_models_templates(
    engine_of: EngineOf, http_of: HttpOf, files: dict[str, bytes]
) -> None:
    further = {**files, "additional_chat_templates/short.jinja": b"{{ messages[0].content }}"}
    async with serving(engine_of(files=further)) as served:
        for name, status in ((None, 200), ("short", 200), ("{{ 1 }}", 400)):
            kwargs = {"chat_template_kwargs": {"chat_template": name}} if name else {}
            answer = await http_of(served).post("/v1/chat/completions", json={**BODY, **kwargs})
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "chat_template_kwargs.chat_template"
        plain, short = (request.input_ids for request in served.engine.requests())
    assert len(short) < len(plain)


async def test_a_part_may_say_where_a_cached_prefix_ends(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    part: Any = {"type": "text", "text": "hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
    async with serving(engine_of()) as served:
        for content in ("hello", [part]):
            await openai_of(served).chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}]
            )
        plain, marked = served.engine.requests()
    assert marked.input_ids == plain.input_ids


async def test_a_message_may_have_a_type_and_no_other(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        for kind, status in ((None, 200), ("text", 200), ("message", 200), ("image", 400)):
            message = {"role": "user", "content": "hello", "type": kind}
            answer = await http_of(served).post("/v1/chat/completions", json={"model": "tiny", "messages": [message]})
            assert answer.status_code == status
        assert len({request.input_ids for request in served.engine.requests()}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("name", "nothing", "something"),
    [
        ("use_beam_search", False, True),
        ("length_penalty", 1, 0.5),
        ("bad_words", [], ["fox"]),
        ("return_tokens_as_token_ids", False, True),
    ],
)
async def test_what_is_not_honoured_may_ask_for_nothing(
    path: str, name: str, nothing: object, something: object, engine_of: EngineOf, http_of: HttpOf
) -> None:
    body = BODY if "chat" in path else {"model": "tiny", "prompt": "hello"}
    async with serving(engine_of()) as served:
        for value in (nothing, None):
            assert (await http_of(served).post(path, json={**body, name: value})).status_code == 200
        refused = await http_of(served).post(path, json={**body, name: something})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_rule_17_parameters_that_change_no_text_are_accepted(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).chat.completions.create(
            **BODY,
            user="me",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            safety_identifier="s",
            prompt_cache_key="k",
            verbosity="low",
            modalities=["text"],
            response_format={"type": "text"},
            tools=[],
            tool_choice="none",
            parallel_tool_calls=True,
            prediction={"type": "content", "content": "Hello"},
        )
    assert answer.choices[0].message.content == "Hello world!"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking_token_budget": 9}, "thinking_token_budget"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]}, "messages[0].audio"),
        ({"messages": [WITH_IMAGES]}, "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "messages[0].content[0]"),
        (
            {"messages": [*USER, {"role": "user", "content": [WITH_SOUND]}]},
            "messages[1].content[0]",
        ),
    ],
)
async def test_rule_17_parameters_that_are_not_honoured_are_refused_by_name(
    engine_of: EngineOf, http_of: HttpOf, asked: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, **asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"prompt_embeds": "gAAA"}, "prompt_embeds"),
        ({"messages": [{"role": "user", "content": "x", "nonsense": 1}]}, "messages[0].nonsense"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ],
)
async def test_rule_17_unknown_parameters_are_refused_by_name(
    engine_of: EngineOf, http_of: HttpOf, asked: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, **asked})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unknown_parameter", param)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": "2"}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"metadata": {str(number): "x" for number in range(1025)}}, "metadata"),
        ({"chat_template_kwargs": {str(number): 1 for number in range(1025)}}, "chat_template_kwargs"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"model": None}, "model"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_rule_15_what_is_out_of_bounds_is_a_400_that_names_it(
    engine_of: EngineOf, http_of: HttpOf, asked: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, **asked})
        assert served.engine.requests() == []
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None or isinstance(error["code"], str)


async def test_sampling_parameters_reach_the_scheduler(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        await openai_of(served).chat.completions.create(
            **BODY,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=-0.1,
            seed=-1,
            n=2,
            max_tokens=7,
            logit_bias={"5": -100},
            extra_body={
                "top_k": 40,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [3],
                "skip_special_tokens": False,
                "priority": 3,
                "cache_salt": "tenant",
            },
        )
        [request] = served.engine.requests()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.1)
    assert (sampling.repetition_penalty, sampling.min_new_tokens, sampling.max_new_tokens) == (1.1, 2, 7)
    assert (sampling.seed, sampling.n, sampling.ignore_eos) == (2**64 - 1, 2, True)
    assert (sampling.stop_token_ids, sampling.logit_bias) == ([3], {5: -100.0})
    assert (request.priority, request.cache_salt) == (3, "tenant")
    assert not decode_spec(request).skip_special_tokens


async def test_requests_without_a_seed_get_one_each(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        for _ in range(3):
            await openai_of(served).chat.completions.create(**BODY)
        assert len({request.sampling.seed for request in served.engine.requests()}) == 3
