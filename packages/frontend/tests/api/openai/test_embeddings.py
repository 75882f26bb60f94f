"""/v1/embeddings, /v1/rerank, /v1/score and /v1/classify before an engine with scripted vectors."""

import asyncio
import base64
import math
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from packages.frontend.tests import encoders
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import EncodingEngine, FakeEngine, Script, Served, serving
from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import ModelLimits, Task, unpack_floats, unpack_ints

Openai = Callable[..., openai.AsyncOpenAI]
Http = Callable[[Served], httpx2.AsyncClient]


def nothing(request: object, index: int) -> list[Any]:
    raise AssertionError("nothing is generated here")


def engine(limits: ModelLimits | None = None, files: dict[str, bytes] | None = None, **options: Any) -> EncodingEngine:
    script: Script = nothing
    return EncodingEngine(script, files=files or encoders.files(), limits=limits or encoders.limits(), **options)


def classifier(*labels: str, **options: Any) -> EncodingEngine:
    return engine(encoders.limits(Task.CLASSIFY, labels), **options)


def second_of_pair(request: TokenizedEmbeddingReqInput) -> list[float]:
    """Score pairs by the number of tokens of the document."""
    return [float(sum(unpack_ints(request.token_types))) - 3.0]


def inputs_of(served: Served) -> list[TokenizedEmbeddingReqInput]:
    return [each for _, each in served.engine.sent if isinstance(each, TokenizedEmbeddingReqInput)]


def unpacked(text: str) -> list[float]:
    return list(unpack_floats(base64.b64decode(text)))


async def test_the_client_gets_the_same_numbers_either_way(openai_of: Openai, http_of: Http) -> None:
    async with serving(engine()) as served:
        texts = ["cat", "the cat sat", "cat"]
        asks_for_base64 = openai_of(served, strict=False)  # unknown to its own strict types
        default = await asks_for_base64.embeddings.create(model="encoder", input=texts)
        plain = await openai_of(served).embeddings.create(model="encoder", input=texts, encoding_format="float")
        assert [each.index for each in default.data] == [0, 1, 2]
        assert [each.embedding for each in default.data] == [each.embedding for each in plain.data]
        assert plain.data[0].embedding == [3.0, 2.0 + 6.0 + 3.0, 0.0, 1.0]
        assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (11, 11)
        raw = (
            await http_of(served).post(
                "/v1/embeddings", json={"model": "encoder", "input": "cat", "encoding_format": "base64"}
            )
        ).json()
        assert unpacked(raw["data"][0]["embedding"]) == plain.data[0].embedding


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("cat", [[2, 6, 3]]),
        (["cat", "dog"], [[2, 6, 3], [2, 7, 3]]),
        ([6, 7], [[6, 7]]),
        ([[6], [7, 8]], [[6], [7, 8]]),
    ],
)
async def test_inputs_are_texts_or_ids_one_or_many(given: Any, wanted: list[list[int]], openai_of: Openai) -> None:
    async with serving(engine()) as served:
        answer = await openai_of(served).embeddings.create(model="encoder", input=given, encoding_format="float")
        assert len(answer.data) == len(wanted)
        assert isinstance(served.engine, EncodingEngine)
        assert [list(unpack_ints(each.input_ids)) for each in served.engine.asked()] == wanted


async def test_dimensions_cut_and_keep_the_length_one(openai_of: Openai) -> None:
    made = engine(vector=lambda _: [3.0, 4.0, 12.0, 0.0])
    async with serving(made) as served:
        client = openai_of(served)
        cut = await client.embeddings.create(model="encoder", input="cat", dimensions=2, encoding_format="float")
        assert cut.data[0].embedding == pytest.approx([0.6, 0.8])
        whole = await client.embeddings.create(model="encoder", input="cat", dimensions=4, encoding_format="float")
        assert whole.data[0].embedding == [3.0, 4.0, 12.0, 0.0]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("embeddings", {"input": ""}, "input", "invalid_value"),
        ("embeddings", {"input": []}, "input", "invalid_value"),
        ("embeddings", {"input": ["cat", ""]}, "input[1]", "invalid_value"),
        ("embeddings", {"input": ["cat"] * 2049}, "input", "invalid_value"),
        ("embeddings", {"input": [[]]}, "input[0]", "invalid_value"),
        ("embeddings", {"input": [-1]}, "input[0]", "invalid_value"),
        ("embeddings", {"input": [20]}, "input", None),
        ("embeddings", {"input": [[5], [20]]}, "input[1]", None),
        ("embeddings", {"input": {"text": "cat"}}, "input", "invalid_value"),
        ("embeddings", {}, "input", "missing_required_parameter"),
        ("embeddings", {"input": "cat " * 15}, "input", "context_length_exceeded"),
        ("embeddings", {"input": ["cat", "cat " * 15]}, "input[1]", "context_length_exceeded"),
        ("embeddings", {"input": "cat", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ("embeddings", {"input": "cat", "dimensions": 0}, "dimensions", "invalid_value"),
        ("embeddings", {"input": "cat", "dimensions": 5}, "dimensions", "invalid_value"),
        ("embeddings", {"input": "cat", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
        ("embeddings", {"input": "cat", "truncate_prompt_tokens": 17}, "truncate_prompt_tokens", None),
        ("embeddings", {"input": "cat", "prompt_name": "q"}, "prompt_name", None),
        ("embeddings", {"input": "cat", "nonsense": 1}, "nonsense", "unknown_parameter"),
        ("embeddings", {"input": "cat", "model": "nobody"}, "model", "model_not_found"),
        ("classify", {"input": "cat"}, "model", None),
        ("rerank", {"query": "cat", "documents": []}, "documents", "invalid_value"),
        ("rerank", {"query": "", "documents": ["a"]}, "query", "invalid_value"),
        ("rerank", {"query": "cat", "documents": ["a", 5]}, "documents[1]", "invalid_value"),
        ("rerank", {"query": "cat", "documents": ["a"], "top_n": 0}, "top_n", "invalid_value"),
        ("rerank", {"query": "cat", "documents": ["a", "cat " * 15]}, "documents[1]", "context_length_exceeded"),
        ("score", {"text_1": ["a", "cat"], "text_2": ["a", "cat", "dog"]}, "text_1", None),
        ("score", {"text_1": "cat " * 15, "text_2": ["a", "cat"]}, "text_1", "context_length_exceeded"),
        ("chat/completions", {"messages": [{"role": "user", "content": "cat"}]}, "model", None),
        ("completions", {"prompt": "cat"}, "model", None),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(
    path: str, body: dict[str, Any], param: str, code: str | None, http_of: Http
) -> None:
    async with serving(engine()) as served:
        answer = await http_of(served).post(f"/v1/{path}", json={"model": "encoder", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404 if code == "model_not_found" else 400, param), error
        if code is not None:
            assert error["code"] == code
        assert isinstance(served.engine, EncodingEngine)
        assert served.engine.asked() == []


async def test_encoders_are_told_whose_an_input_is(http_of: Http) -> None:
    """The tenant is equal for all inputs of a key, differs from the key, and is empty if nothing needs it."""
    ask = {"model": "encoder", "input": ["cat", "the cat sat"]}
    async with serving(engine(), HttpConfig(api_key=("mine", "yours"))) as served:
        for key in ("mine", "yours"):
            answer = await http_of(served).post("/v1/embeddings", json=ask, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        mine, again, yours, _ = [each.tenant for each in inputs_of(served)]
    assert mine == again != yours
    assert {"", "mine", "yours"}.isdisjoint({mine, yours})
    async with serving(engine()) as served:
        assert (await http_of(served).post("/v1/embeddings", json=ask)).status_code == 200
        assert [each.tenant for each in inputs_of(served)] == ["", ""]


async def test_a_model_that_generates_makes_no_vectors(engine_of: Callable[..., FakeEngine], http_of: Http) -> None:
    async with serving(engine_of()) as served:
        for path, body in (
            ("embeddings", {"input": "cat"}),
            ("classify", {"input": "cat"}),
            ("rerank", {"query": "cat", "documents": ["dog"]}),
            ("score", {"text_1": "cat", "text_2": "dog"}),
        ):
            answer = await http_of(served).post(f"/v1/{path}", json={"model": "tiny", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            assert "generates text" in answer.json()["error"]["message"]


async def test_a_frontend_without_detokenizers_is_ready_for_vectors(http_of: Http) -> None:
    async with serving(engine()) as served:
        assert (await http_of(served).get("/health")).status_code == 200


async def test_truncation_cuts_instead_of_refusing(http_of: Http) -> None:
    async with serving(engine()) as served:
        http = http_of(served)
        answer = await http.post(
            "/v1/embeddings", json={"model": "encoder", "input": "cat " * 40, "truncate_prompt_tokens": -1}
        )
        assert answer.json()["usage"]["prompt_tokens"] == 16
        answer = await http.post(
            "/v1/embeddings", json={"model": "encoder", "input": "cat " * 40, "truncate_prompt_tokens": 5}
        )
        assert answer.json()["usage"]["prompt_tokens"] == 5


async def test_documents_come_back_the_most_relevant_first(http_of: Http) -> None:
    made = classifier("LABEL_0", vector=second_of_pair)
    async with serving(made) as served:
        http = http_of(served)
        documents = ["rain", "the cat sat on", {"text": "cat sat"}]
        body = {"model": "encoder", "query": "cat", "documents": documents}
        answer = (await http.post("/v1/rerank", json=body)).json()
        scores = [1 / (1 + math.exp(-logit)) for logit in (2.0, 0.0, -1.0)]  # tokens of the documents and [SEP], less 3
        assert [each["index"] for each in answer["results"]] == [1, 2, 0]
        assert [each["relevance_score"] for each in answer["results"]] == pytest.approx(scores)
        assert [each["document"]["text"] for each in answer["results"]] == ["the cat sat on", "cat sat", "rain"]
        assert answer["model"] == "encoder"
        assert answer["usage"]["total_tokens"] == 3 * 3 + 2 + 5 + 3
        some = (await http.post("/v1/rerank", json={**body, "top_n": 2, "return_documents": False})).json()
        assert [each.keys() for each in some["results"]] == [{"index", "relevance_score"}] * 2
        for path in ("/v2/rerank", "/rerank"):
            same = (await http.post(path, json=body)).json()
            assert same["results"] == answer["results"]
        raw = (await http.post("/v1/rerank", json={**body, "use_activation": False})).json()
        assert [each["relevance_score"] for each in raw["results"]] == [2.0, 0.0, -1.0]
        first = made.asked()[0]
        assert list(unpack_ints(first.input_ids)) == [2, 6, 3, 12, 3]
        assert list(unpack_ints(first.token_types)) == [0, 0, 0, 1, 1]


async def test_a_model_that_embeds_ranks_by_cosine_and_embeds_each_text_once(http_of: Http) -> None:
    directions = {6: [1.0, 0.0, 0.0, 0.0], 7: [0.6, 0.8, 0.0, 0.0], 12: [-3.0, 0.0, 0.0, 0.0], 9: [0.0] * 4}
    made = engine(vector=lambda request: directions[unpack_ints(request.input_ids)[1]])
    async with serving(made) as served:
        http = http_of(served)
        body = {"model": "encoder", "query": "cat", "documents": ["dog", "rain", "cat", "on", "dog"]}
        answer = (await http.post("/v1/rerank", json=body)).json()
        assert [each["index"] for each in answer["results"]] == [2, 0, 4, 3, 1]
        assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([1, 0.6, 0.6, 0, -1])
        assert len(made.asked()) == 4
        score = await http.post("/v1/score", json={"model": "encoder", "text_1": ["cat"], "text_2": ["dog", "rain"]})
        assert [each["score"] for each in score.json()["data"]] == pytest.approx([0.6, -1])


@pytest.mark.parametrize(("name", "scores"), [("dot", [0.6, -3]), ("euclidean", [-(0.8**0.5), -4])])
async def test_a_model_that_embeds_compares_as_its_files_say(name: str, scores: list[float], http_of: Http) -> None:
    directions = {6: [1.0, 0.0, 0.0, 0.0], 7: [0.6, 0.8, 0.0, 0.0], 12: [-3.0, 0.0, 0.0, 0.0]}
    files = encoders.files(config_sentence_transformers={"similarity_fn_name": name})
    made = engine(files=files, vector=lambda request: directions[unpack_ints(request.input_ids)[1]])
    async with serving(made) as served:
        body = {"model": "encoder", "text_1": ["cat"], "text_2": ["dog", "rain"]}
        score = await http_of(served).post("/v1/score", json=body)
        assert [each["score"] for each in score.json()["data"]] == pytest.approx(scores)


async def test_coheres_clients_say_null_for_what_they_do_not_ask(http_of: Http) -> None:
    """Use the request bodies of its two clients, as LangChain and others send them."""
    async with serving(classifier("LABEL_0", vector=second_of_pair)) as served:
        http = http_of(served)
        body = {"model": "encoder", "query": "cat", "documents": ["rain", "the cat sat on"], "top_n": 1}
        for path, more in (
            ("/v2/rerank", {"max_tokens_per_doc": None, "priority": None}),
            ("/v1/rerank", {"rank_fields": None, "return_documents": False, "max_chunks_per_doc": None}),
        ):
            answer = await http.post(path, json={**body, **more})
            assert [each["index"] for each in answer.json()["results"]] == [1]
        for param, value in (("rank_fields", ["text"]), ("max_chunks_per_doc", 10)):
            answer = await http.post("/v1/rerank", json={**body, param: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_documents_are_cut_to_so_many_tokens_and_to_what_the_model_reads(http_of: Http) -> None:
    documents = ["dog", "the cat sat on", "cat " * 40]
    lengths = []
    for made in (classifier("LABEL_0", vector=second_of_pair), engine()):
        async with serving(made) as served:
            for most in (2, 4096):
                body = {"model": "encoder", "query": "rain", "documents": documents, "max_tokens_per_doc": most}
                answer = await http_of(served).post("/v2/rerank", json=body)
                assert len(answer.json()["results"]) == 3
        lengths.append([len(unpack_ints(request.input_ids)) for request in made.asked()])
    assert lengths == [[5, 6, 6, 5, 8, 16], [3, 3, 4, 4, 3, 3, 6, 16]]


async def test_a_query_as_long_as_the_model_reads_leaves_no_document_to_cut(http_of: Http) -> None:
    async with serving(classifier("LABEL_0")) as served:
        body = {"model": "encoder", "query": "cat " * 13, "documents": ["dog rain"], "max_tokens_per_doc": 4}
        answer = await http_of(served).post("/v2/rerank", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents[0]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"query": "cat " * 15, "documents": ["a", "dog"]}, "query"),
        ("rerank", {"query": "cat " * 7, "documents": ["a", "cat " * 7]}, "documents[1]"),
        ("score", {"text_1": ["a", "cat " * 15], "text_2": ["a", "dog"]}, "text_1[1]"),
        ("score", {"text_1": ["cat " * 15], "text_2": ["a", "dog"]}, "text_1[0]"),
        ("score", {"text_1": "cat", "text_2": ["a", "cat " * 15]}, "text_2[1]"),
        ("score", {"text_1": "cat", "text_2": "cat " * 15}, "text_2"),
    ],
)
async def test_a_pair_that_is_too_long_is_refused_by_name(
    path: str, body: dict[str, Any], param: str, http_of: Http
) -> None:
    async with serving(classifier("LABEL_0")) as served:
        answer = await http_of(served).post(f"/v1/{path}", json={"model": "encoder", **body})
        assert answer.json()["error"]["param"] == param


async def test_scores_are_given_pair_by_pair(http_of: Http) -> None:
    async with serving(classifier("LABEL_0", vector=second_of_pair)) as served:
        http = http_of(served)
        for left, right in (("cat", ["rain", "the cat sat on"]), (["cat", "dog"], ["rain", "the cat sat on"])):
            body = {"model": "encoder", "text_1": left, "text_2": right, "use_activation": False}
            answer = (await http.post("/v1/score", json=body)).json()
            assert [(each["index"], each["score"]) for each in answer["data"]] == [(0, -1.0), (1, 2.0)]
            assert answer["object"] == "list"


async def test_vllms_clients_find_scores_and_classes_without_v1(http_of: Http) -> None:
    async with serving(classifier("LABEL_0", vector=second_of_pair)) as served:
        body = {"model": "encoder", "text_1": "cat", "text_2": ["rain", "the cat sat on"]}
        answer = await http_of(served).post("/score", json=body)
        assert [each["index"] for each in answer.json()["data"]] == [0, 1]
    async with serving(classifier("calm", "wild", vector=lambda _: [0.0, 1.0])) as served:
        answer = await http_of(served).post("/classify", json={"model": "encoder", "input": "cat"})
        assert [each["label"] for each in answer.json()["data"]] == ["wild"]


async def test_inputs_are_classified(http_of: Http) -> None:
    logits = {6: [0.0, math.log(3)], 7: [2.0, -1.0]}
    made = classifier("calm", "wild", vector=lambda request: logits[unpack_ints(request.input_ids)[1]])
    async with serving(made) as served:
        http = http_of(served)
        answer = (await http.post("/v1/classify", json={"model": "encoder", "input": ["cat", "dog"]})).json()
        assert [each["label"] for each in answer["data"]] == ["wild", "calm"]
        assert answer["data"][0]["probs"] == pytest.approx([0.25, 0.75])
        assert [each["num_classes"] for each in answer["data"]] == [2, 2]
        raw = await http.post("/v1/classify", json={"model": "encoder", "input": "dog", "use_activation": False})
        assert raw.json()["data"][0]["probs"] == [2.0, -1.0]
        refused = await http.post("/v1/rerank", json={"model": "encoder", "query": "cat", "documents": ["dog"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        refused = await http.post("/v1/embeddings", json={"model": "encoder", "input": "dog"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("rerank", {"query": "cat", "documents": ["dog", "hen"]}),
        ("score", {"text_1": "cat", "text_2": "dog"}),
        ("classify", {"input": "cat"}),
    ],
)
async def test_ids_are_those_of_the_requests_and_end_them(http_of: Http, path: str, fields: dict[str, Any]) -> None:
    encoder = classifier("good", auto=False, vector=lambda _request: [0.5])
    async with serving(encoder) as served:
        http = http_of(served)
        embedding_request = asyncio.create_task(http.post(f"/v1/{path}", json={"model": "encoder", **fields}))
        public = f"{path}-{await rid_of_next(encoder)}"
        await http.post("/abort_request", json={"rid": public})
        assert (await embedding_request).json()["error"]["code"] == "request_aborted"
        encoder.sent.clear()
        embedding_request = asyncio.create_task(http.post(f"/v1/{path}", json={"model": "encoder", **fields}))
        public = f"{path}-{await rid_of_next(encoder)}"
        encoder.step()
        assert (await embedding_request).json()["id"] == public


async def rid_of_next(encoder: EncodingEngine) -> str:
    async with asyncio.timeout(10):
        while not encoder.asked():  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)
    return encoder.asked()[-1].rid.rpartition(".")[0]
