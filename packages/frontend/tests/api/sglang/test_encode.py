"""SGLang's /encode, and /classify in SGLang's and vLLM's forms."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from packages.frontend.tests import encoders
from tercet.frontend.testing import EncodingEngine, Served, serving
from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import Task, unpack_ints

HttpOf = Callable[[Served], httpx2.AsyncClient]


def first_ids(request: TokenizedEmbeddingReqInput) -> list[float]:
    return [float(each) for each in unpack_ints(request.input_ids)[:4]]


def engine(task: Task = Task.EMBED) -> EncodingEngine:
    labels = ("bad", "good") if task is Task.CLASSIFY else ()
    limits = encoders.limits(task, labels)
    return EncodingEngine(
        lambda *_: [], encoders.files(), limits, vector=lambda request: first_ids(request)[: limits.width]
    )


async def test_one_input_is_answered_with_one_vector(http_of: HttpOf) -> None:
    async with serving(engine()) as served:
        http = http_of(served)
        text = (await http.post("/encode", json={"text": "a cat sat"})).json()
        ids = (await http.post("/encode", json={"input_ids": [2, 5, 6, 8], "model": "encoder"})).json()
    assert text["embedding"] == [2.0, 5.0, 6.0, 8.0]
    assert text["meta_info"]["prompt_tokens"] == 5
    assert ids["embedding"] == text["embedding"]


async def test_several_inputs_are_answered_with_a_list(http_of: HttpOf) -> None:
    async with serving(engine()) as served:
        http = http_of(served)
        texts = (await http.post("/encode", json={"text": ["a cat", "a dog sat"], "dimensions": 2})).json()
        ids = (await http.post("/encode", json={"input_ids": [[2, 5, 6, 8]]})).json()
    assert [each["meta_info"]["prompt_tokens"] for each in texts] == [4, 5]
    assert texts[0]["embedding"] == pytest.approx([2 / 29**0.5, 5 / 29**0.5])
    assert [each["embedding"] for each in ids] == [[2.0, 5.0, 6.0, 8.0]]


async def test_classify_has_the_form_of_the_request(http_of: HttpOf) -> None:
    async with serving(engine(Task.CLASSIFY)) as served:
        http = http_of(served)
        native = (await http.post("/classify", json={"text": "a cat"})).json()
        body = {"model": "encoder", "input": "a cat", "use_activation": False}
        ours = (await http.post("/classify", json=body)).json()
        same = (await http.post("/v1/classify", json=body)).json()
    assert native["embedding"] == [2.0, 5.0]
    assert ours["data"] == same["data"] == [{"index": 0, "label": "good", "probs": [2.0, 5.0], "num_classes": 2}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/encode", {}, "text"),
        ("/encode", {"text": "a", "input_ids": [1]}, "text"),
        ("/encode", {"text": "a", "image_data": ["x"]}, "image_data"),
        ("/encode", {"text": "a", "rid": "mine"}, "rid"),
        ("/encode", {"text": "a", "dimensions": 9}, "dimensions"),
        ("/encode", {"text": ["a"] * 2 + ["a " * 20]}, "text[2]"),
        ("/classify", {"input": "a"}, "model"),
        ("/classify", {"input": "a", "text": "a", "model": "encoder"}, "input"),
        ("/classify", {"input": "a", "model": "encoder", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/classify", {"text": "a"}, "model"),
    ],
)
async def test_refusals_name_the_parameter(http_of: HttpOf, path: str, body: dict[str, Any], param: str) -> None:
    async with serving(engine()) as served:
        answer = await http_of(served).post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
