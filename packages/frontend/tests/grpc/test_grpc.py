"""The gRPC service: requests and tokens as over HTTP, and errors, deaths and garbage that harm no other call."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

pytest.importorskip("grpc_health.v1", reason="gRPC is an optional extra")

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from packages.frontend.tests import encoders
from packages.frontend.tests.grpc.calls import client, generate, grpc_serving
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.grpc.schema import POOL, SERVICE, message
from tercet.frontend.grpc.server import GrpcServer
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, Token
from tercet.protocol.messages.messages import AbortReq, TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, Task

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
IDS = [5, 6, 7]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def same_everywhere(request: TokenizedGenerateReqInput) -> TokenizedGenerateReqInput:
    """A scheduler's request without its own id and seed."""
    sampling = msgspec.structs.replace(request.sampling, seed=0)
    return msgspec.structs.replace(request, rid="", sampling=sampling)


@pytest.mark.parametrize(
    ("sampling", "over_http"),
    [
        ({}, {"temperature": 1}),
        ({"temperature": 0}, {"temperature": 0}),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1},
        ),
        (
            {"frequency_penalty": 0.5, "presence_penalty": -0.5, "n": 2, "min_new_tokens": 2, "max_new_tokens": 7},
            {"frequency_penalty": 0.5, "presence_penalty": -0.5, "n": 2, "min_new_tokens": 2, "max_new_tokens": 7},
        ),
        (
            {"stop": ["x", "yz"], "stop_token_ids": [9], "ignore_eos": True, "no_stop_trim": True},
            {"stop": ["x", "yz"], "stop_token_ids": [9], "ignore_eos": True, "no_stop_trim": True},
        ),
        ({"logit_bias": {"9": -3.0}, "stream_interval": 4}, {"logit_bias": {"9": -3.0}}),
        (
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        ),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"ebnf_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    ],
)
async def test_schedulers_get_the_same_requests_as_from_http(
    engine_of: EngineOf, http_of: HttpOf, sampling: dict[str, Any], over_http: dict[str, Any]
) -> None:
    async with grpc_serving(engine_of()) as (served, peer):
        ended = [each.complete async for each in peer.call("Generate", generate(IDS, sampling=sampling))]
        body = {"input_ids": IDS, "sampling_params": {"temperature": 1, **over_http}}
        answer = (await http_of(served).post("/generate", json=body)).json()
        first, second = served.engine.requests()
    assert same_everywhere(first) == same_everywhere(second)
    choices = answer if isinstance(answer, list) else [answer]
    assert [list(each.output_ids) for each in ended] == [each["output_ids"] for each in choices]
    assert [each.index for each in ended] == list(range(len(choices)))
    for each, choice in zip(ended, choices, strict=True):
        finish = choice["meta_info"]["finish_reason"]
        assert each.finish_reason == finish["type"]
        kind = each.WhichOneof("matched_stop")
        assert (getattr(each, kind) if kind else None) == finish.get("matched")
        assert (each.prompt_tokens, each.completion_tokens) == (3, len(choice["output_ids"]))


async def test_chunks_of_a_stream_make_up_the_whole(engine_of: EngineOf) -> None:
    async with grpc_serving(engine_of()) as (_, peer):
        request = generate(IDS, "mine", stream=True, sampling={"n": 2})
        answers = [each async for each in peer.call("Generate", request)]
        whole = [list(each.complete.output_ids) async for each in peer.call("Generate", generate(IDS))]
    assert {each.request_id for each in answers} == {"mine"}
    for index in (0, 1):
        chunks = [each.chunk for each in answers if each.HasField("chunk") and each.chunk.index == index]
        (end,) = [each.complete for each in answers if each.HasField("complete") and each.complete.index == index]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == list(end.output_ids) == whole[0]
        assert [chunk.completion_tokens for chunk in chunks] == sorted({chunk.completion_tokens for chunk in chunks})
        assert end.completion_tokens == len(tokens) == chunks[-1].completion_tokens


def scored(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    """Two tokens with two alternatives each."""
    return [
        Token(9, "a", logprob=-0.5, top=((9, -0.5), (8, -1.5))),
        Token(7, "b", FinishReason(FinishType.LENGTH), logprob=-0.25, top=((7, -0.25), (6, -2.5))),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_http(engine_of: EngineOf, http_of: HttpOf, *, stream: bool) -> None:
    async with grpc_serving(engine_of(scored)) as (served, peer):
        request = generate(IDS, stream=stream, return_logprob=True, top_logprobs_num=2, logprob_start_len=-1)
        answers = [each async for each in peer.call("Generate", request)]
        body = {"input_ids": IDS, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}
        meta = (await http_of(served).post("/generate", json=body)).json()["meta_info"]
    scores = answers[-1].complete.output_logprobs
    assert [[value, token, None] for value, token in zip(scores.token_logprobs, scores.token_ids, strict=True)] == meta[
        "output_token_logprobs"
    ]
    assert [
        [[value, token, None] for value, token in zip(each.values, each.token_ids, strict=True)]
        for each in scores.top_logprobs
    ] == meta["output_top_logprobs"]
    chunks = [each.chunk.output_logprobs for each in answers if each.HasField("chunk")]
    assert [value for chunk in chunks for value in chunk.token_logprobs] == list(scores.token_logprobs) * stream


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (generate([]), "input_ids"),
        (generate(IDS, sampling={"temperature": -1}), "sampling_params.temperature"),
        (generate(IDS, sampling={"top_p": 1.5}), "sampling_params.top_p"),
        (generate(IDS, sampling={"n": 1000}), "sampling_params.n"),
        (generate(IDS, sampling={"max_new_tokens": 10_000}), "sampling_params.max_new_tokens"),
        (generate(IDS, sampling={"regex": "("}), "sampling_params.regex"),
        (generate(IDS, sampling={"structural_tag": "{"}), "sampling_params.structural_tag"),
        (generate(IDS, sampling={"custom_params": {"a": 1}}), "custom_params"),
        (generate([5] * 500), "input_ids"),
        (generate([10**6]), "input_ids"),
        (generate([5] * 10**6), "input_ids"),
        (generate(IDS, sampling={"stop_token_ids": [5] * 10**6}), "sampling_params.stop_token_ids"),
        (generate(IDS, sampling={"logit_bias": {str(n): 1.0 for n in range(10**5)}}), "sampling_params.logit_bias"),
        (generate(IDS, mm_inputs={}), "image_data"),
        (generate(IDS, input_embeds=[1.0]), "input_embeds"),
        (generate(IDS, token_ids_logprob=[1]), "token_ids_logprob"),
        (generate(IDS, return_hidden_states=True), "return_hidden_states"),
        (generate(IDS, custom_logit_processor="x"), "custom_logit_processor"),
        (generate(IDS, data_parallel_rank=1), "data_parallel_rank"),
        (generate(IDS, disaggregated_params={"bootstrap_host": "h"}), "bootstrap_host"),
        (generate(IDS, top_logprobs_num=99, return_logprob=True), "top_logprobs_num"),
        (message("GenerateRequest")(), "tokenized"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(engine_of: EngineOf, request_: Any, named: str) -> None:
    async with grpc_serving(engine_of()) as (served, peer):
        code, details = await peer.refusal("Generate", request_)
        assert served.engine.requests() == []
    assert code == INVALID
    assert named in details


@pytest.mark.parametrize("address", ["127.0.0.1", ":5", "host:99999", "host:x"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="--grpc-listen"):
        HttpConfig(grpc_listen=address)


async def test_an_address_in_use_is_refused_by_name(engine_of: EngineOf) -> None:
    async with grpc_serving(engine_of()) as (served, peer):
        config = HttpConfig(grpc_listen=f"127.0.0.1:{peer.port}")
        server = GrpcServer(served.manager, ChatPlanner(ServingConfig()), config)
        with pytest.raises(ValueError, match=f"--grpc-listen {config.grpc_listen}"):
            await server.start()
        await server.close()


async def test_an_adapter_is_named_by_its_id(adapting: EngineOf) -> None:
    config = ServingConfig(lora=("haiku=/haiku",))
    async with grpc_serving(adapting(), config=config) as (served, peer):
        async with asyncio.timeout(10):
            while served.manager.adapters.pending:  # noqa: ASYNC110 - loading sends no event
                await asyncio.sleep(0.001)
        assert [each async for each in peer.call("Generate", generate(IDS, lora_id="haiku"))]
        (sent,) = served.engine.requests()
        assert sent.lora is not None
        assert sent.lora.path == "/haiku"
        assert await peer.refusal("Generate", generate(IDS, lora_id="tiny")) == (
            INVALID,
            "'tiny' is a model, not an adapter. (parameter: lora_id)",
        )
        code, details = await peer.refusal("Generate", generate(IDS, lora_id="ode"))
    assert (code, "ode" in details) == (grpc.StatusCode.NOT_FOUND, True)


async def sent_request(engine: FakeEngine) -> None:
    async with asyncio.timeout(10):
        while not engine.requests():  # noqa: ASYNC110 - the engine sends no event
            await asyncio.sleep(0.001)


async def test_a_request_resumes_when_its_scheduler_dies(engine_of: EngineOf) -> None:
    engine = engine_of(schedulers=["scheduler-0", "scheduler-1"], auto=False)
    async with grpc_serving(engine) as (served, peer):
        call = peer.call("Generate", generate(IDS, stream=True))
        reading = asyncio.create_task(_read(call))
        await sent_request(engine)
        engine.step()
        engine.step()
        engine.down("scheduler-0")
        for _ in range(20):
            engine.step()
            await asyncio.sleep(0.001)
        answers = await reading
        resumed = engine.requests()[-1]
        assert served.manager.counters.resumed_finished == 1
    tokens = [token for each in answers[:-1] for token in each.chunk.token_ids]
    assert tokens == list(answers[-1].complete.output_ids)
    assert len(set(tokens)) > 1
    assert (resumed.attempt, len(resumed.resume)) == (1, 1)


async def _read(call: Any) -> list[Any]:
    return [each async for each in call]


async def test_a_client_aborts_its_request_by_its_id(engine_of: EngineOf) -> None:
    async with grpc_serving(engine_of(auto=False)) as (served, peer):
        reading = asyncio.create_task(_read(peer.call("Generate", generate(IDS, "mine", stream=True))))
        await sent_request(served.engine)
        served.engine.step()
        assert not (await peer.call("Abort", message("AbortRequest")(request_id="other"))).success
        assert (await peer.call("Abort", message("AbortRequest")(request_id="mine"))).success
        answers = await reading
        assert not (await peer.call("Abort", message("AbortRequest")(request_id="mine"))).success
        await served.until_idle()
    assert answers[-1].complete.finish_reason == "abort"
    assert any(isinstance(sent, AbortReq) for _, sent in served.engine.sent)


async def test_a_cancelled_call_aborts_its_request(engine_of: EngineOf) -> None:
    async with grpc_serving(engine_of(auto=False)) as (served, peer):
        call = peer.call("Generate", generate(IDS, stream=True))
        reading = asyncio.create_task(_read(call))
        await sent_request(served.engine)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(10):
            while not any(isinstance(sent, AbortReq) for _, sent in served.engine.sent):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await served.until_idle()


async def test_garbage_ends_its_own_call_alone(engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    async with grpc_serving(engine_of(), HttpConfig(max_body_bytes=4096)) as (_, peer):
        for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(99)):
            with socket.create_connection(("127.0.0.1", peer.port)) as raw:
                raw.sendall(data)
        unparsed = peer.channel.unary_unary(f"/{SERVICE}/Embed")
        for payload, expected in ((b"\xff" * 99, INVALID), (bytes(5000), grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unparsed(payload)
            assert refused.value.code() == expected
        code, _ = await peer.refusal("Generate", generate([5] * 9000))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [each async for each in peer.call("Generate", generate(IDS))]
    assert caplog.records == [], "garbage could fill the log"


async def test_connections_beyond_the_limit_are_closed(engine_of: EngineOf) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
    async with grpc_serving(engine_of(), connections=9) as (_, peer):
        assert [each async for each in peer.call("Generate", generate(IDS))]
        opened = [await asyncio.open_connection("127.0.0.1", peer.port) for _ in range(40)]
        for _, writer in opened:
            writer.write(preface)
        heads = [await _head(reader) for reader, _ in opened]
        assert sum(map(bool, heads)) == 9 - 1
        assert [each async for each in peer.call("Generate", generate(IDS))], "an open connection goes on"
        for _, writer in opened:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Return the first bytes of a server, none if it closes the connection."""
    try:
        async with asyncio.timeout(5):
            return await reader.read(9)
    except ConnectionError:
        return b""


async def test_api_keys_are_needed_and_separate_their_requests(engine_of: EngineOf) -> None:
    async with grpc_serving(engine_of(auto=False), HttpConfig(api_key=("k", "l"))) as (served, anonymous):
        port = anonymous.port
        for name in ("Generate", "Embed", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads"):
            assert (await anonymous.refusal(name))[0] == grpc.StatusCode.UNAUTHENTICATED
        assert (await anonymous.call("HealthCheck")).healthy
        async with client(port, "k") as mine, client(port, "l") as other, client(port, "x") as wrong:
            assert (await wrong.refusal("GetModelInfo"))[0] == grpc.StatusCode.UNAUTHENTICATED
            reading = asyncio.create_task(_read(mine.call("Generate", generate(IDS, "id"))))
            await sent_request(served.engine)
            assert served.engine.requests()[0].tenant
            assert not (await other.call("Abort", message("AbortRequest")(request_id="id"))).success
            assert (await mine.call("Abort", message("AbortRequest")(request_id="id"))).success
            assert (await reading)[0].complete.finish_reason == "abort"


async def test_without_schedulers_calls_are_unavailable(engine_of: EngineOf) -> None:
    engine = engine_of(schedulers=["scheduler-0"])
    async with grpc_serving(engine, max_waiting=0) as (_, peer):
        assert (await peer.call("HealthCheck")).healthy
        engine.down("scheduler-0")
        assert not (await peer.call("HealthCheck")).healthy
        assert (await peer.refusal("Generate", generate(IDS)))[0] == grpc.StatusCode.UNAVAILABLE


async def test_health_and_reflection_follow_their_standards(engine_of: EngineOf) -> None:
    engine = engine_of(schedulers=["scheduler-0"])
    async with grpc_serving(engine) as (_, peer):
        health = health_pb2_grpc.HealthStub(peer.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        states = health_pb2.HealthCheckResponse
        async with asyncio.timeout(10):
            while (await watch.read()).status != states.SERVING:
                pass
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
            engine.down("scheduler-0")
            while (await watch.read()).status != states.NOT_SERVING:
                pass
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(peer.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        ]
        listed, described, of_health = [each async for each in reflection.ServerReflectionInfo(iter(asked))]
    services = {each.name for each in listed.list_services_response.service}
    assert services == {SERVICE, "grpc.health.v1.Health"}
    own = POOL.FindServiceByName(SERVICE).file.serialized_pb
    assert own in described.file_descriptor_response.file_descriptor_proto
    assert of_health.file_descriptor_response.file_descriptor_proto


async def test_models_and_loads_are_those_of_http(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with grpc_serving(engine_of()) as (served, peer):
        http = http_of(served)
        model, own = await peer.call("GetModelInfo"), (await http.get("/model_info")).json()
        info = await peer.call("GetServerInfo")
        loads, of_http = await peer.call("GetLoads"), (await http.get("/v1/loads")).json()["loads"]
        one = await peer.call("GetLoads", message("GetLoadsRequest")(dp_rank=7))
    for name in ("model_path", "tokenizer_path", "served_model_name", "is_generation", "weight_version"):
        assert getattr(model, name) == own[name], name
    assert (model.max_context_length, model.vocab_size) == (128, served.manager.models.get("tiny").limits.vocab_size)
    assert info.server_type == "grpc"
    assert info.server_args["served_model_name"] == "tiny"
    assert loads.dp_rank_count == len(loads.loads) == len(of_http)
    for name in ("num_running_reqs", "num_waiting_reqs", "max_total_num_tokens", "max_running_requests"):
        assert getattr(loads.loads[0], name) == of_http[0][name], name
    assert (one.dp_rank_count, len(one.loads)) == (len(of_http), 0)


async def test_vectors_are_those_of_http(http_of: HttpOf) -> None:
    def nothing(request: object, index: int) -> list[Token]:
        raise AssertionError("nothing is generated here")

    engine = EncodingEngine(nothing, files=encoders.files(), limits=encoders.limits())
    async with grpc_serving(engine) as (served, peer):
        answer = await peer.call("Embed", message("EmbedRequest")(tokenized={"input_ids": IDS}))
        own = (await http_of(served).post("/encode", json={"input_ids": IDS})).json()
        assert (await peer.refusal("Embed"))[0] == INVALID
        assert (await peer.refusal("Generate", generate(IDS)))[0] == INVALID
        assert served.manager.models.get("encoder").limits.task is Task.EMBED
    assert list(answer.embedding) == pytest.approx(own["embedding"])
    assert (answer.embedding_dim, answer.prompt_tokens) == (len(own["embedding"]), own["meta_info"]["prompt_tokens"])


def test_the_compiled_schema_is_that_of_the_file() -> None:
    pytest.importorskip("grpc_tools", reason="the compiler is a tool of developers")
    from tools.grpc_schema import FOLDER, compiled

    assert compiled() == (FOLDER / "sglang_scheduler.binpb").read_bytes()
