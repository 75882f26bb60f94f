"""The OpenAPI document is complete and valid, and its examples are true."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

from packages.frontend.tests import encoders
from tercet.frontend.api.docs.openapi import document
from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.sglang.adapter_routes import UNLOAD_PATHS
from tercet.frontend.config.config import HttpConfig, StoreConfig
from tercet.frontend.server.middleware import RequestMiddleware
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits, Task

Operated = tuple[str, str]
"""Method and path."""
EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


@cache
def described() -> dict[str, Any]:
    """Return the document, which takes a fifth of a second to make."""
    return document(OPERATIONS)


def refs(value: Any) -> Iterator[str]:
    match value:
        case dict():
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for each in value.values():
                yield from refs(each)
        case list():
            for each in value:
                yield from refs(each)


async def test_the_table_and_the_router_are_equal(engine_of: EngineOf) -> None:
    async with serving(engine_of()) as served:
        access = served.server.config.app
        assert isinstance(access, RequestMiddleware)
        assert isinstance(access.app, FastAPI)
        routes = {
            (method, route.path)
            for route in access.app.routes
            if isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}
        }
    undocumented, gone = routes - OPERATIONS.keys(), OPERATIONS.keys() - routes
    assert not undocumented, "describe these routes in a file of packages/frontend/src/tercet/frontend/api/docs"
    assert not gone, "add these to `routes` of their endpoint class in api/, or remove them from api/docs"


async def test_it_is_served(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).get("/openapi.json")
    assert answer.status_code == 200
    described = answer.json()
    assert described["openapi"].startswith("3.1")
    known = described["components"]["schemas"]
    assert {ref.rpartition("/")[2] for ref in refs(described)} <= set(known)
    assert described["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"


def agree(example: Any, answer: Any, where: str) -> None:
    """Check that both have the same names and types at every depth. An object without names may have any."""
    if example is None or answer is None:
        return
    if isinstance(example, float) and isinstance(answer, int):
        answer = float(answer)
    assert type(example) is type(answer), where
    if isinstance(example, dict) and example:
        assert example.keys() == answer.keys(), where
        for name, value in example.items():
            agree(value, answer[name], f"{where}.{name}")
    if isinstance(example, list) and example and answer:
        agree(example[0], answer[0], f"{where}[0]")


async def ask(http: httpx2.AsyncClient, route: Operated, model: str, **ids: str) -> None:
    """Check that the response to a route's request example resembles its response example."""
    method, path = route
    for name, value in ids.items():
        path = path.replace(f"{{{name}}}", value)
    body = {**OPERATIONS[route].example}
    if "model" in body:
        body["model"] = model
    headers = {"authorization": "Bearer boss"}
    answer = await http.request(method, path.replace("{model:path}", model), json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    told = answer.json() if OPERATIONS[route].media_type == "application/json" else answer.text
    agree(OPERATIONS[route].response, told, path)


ENDLESS = {("GET", "/status/stream")}
"""Routes whose answer has a test of its own."""
FORMS = {route for route, operation in OPERATIONS.items() if operation.form}
"""Routes of models that take audio, in `test_transcriptions.py`."""
SCORES = {
    ("POST", "/v1/embeddings"): encoders.limits(),
    **{("POST", path): encoders.limits() for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    **{("POST", path): encoders.limits() for path in ("/v1/score", "/score")},
    ("POST", "/encode"): encoders.limits(),
    **{("POST", path): encoders.limits(Task.CLASSIFY, ("bad", "good")) for path in ("/v1/classify", "/classify")},
}


async def test_every_answer_is_like_its_example(
    engine_of: EngineOf, http_of: HttpOf, limits: ModelLimits, tmp_path: Path
) -> None:
    store = StoreConfig(response_store=str(tmp_path / "responses.sqlite"))
    deletes = [route for route in OPERATIONS if route[0] == "DELETE"]
    later = [*sorted(deletes, key=lambda route: -len(route[1])), ("POST", "/close_session")]
    """Nested resources, which have longer paths, are deleted first."""
    unloads = [("POST", path) for path in UNLOAD_PATHS]
    engine = engine_of(limits=msgspec.structs.replace(limits, max_loras=8))
    async with serving(engine, HttpConfig(admin_key=("boss",)), store=store) as served:
        http = http_of(served)
        headers = {"authorization": "Bearer boss"}
        body = {"model": "tiny", "input": "hello", "background": True}
        made = (await http.post("/v1/responses", json=body, headers=headers)).json()["id"]
        session = OPERATIONS["POST", "/close_session"].example["session_id"]
        await http.post("/open_session", json={"capacity_of_str_len": 9, "session_id": session}, headers=headers)
        await http.post("/generate", json={"text": "hello"}, headers=headers)
        body = {"items": [{"id": "msg_1", "role": "user", "content": "hello"}], "metadata": {"topic": "tea"}}
        said = (await http.post("/v1/conversations", json=body, headers=headers)).json()["id"]
        body = {
            **OPERATIONS["POST", "/v1/chat/completions"].example,
            "model": "tiny",
            "store": True,
            "metadata": {"topic": "tea"},
        }
        chat = (await http.post("/v1/chat/completions", json=body, headers=headers)).json()["id"]
        ids = {
            "name": "app.js",
            "response_id": made,
            "conversation_id": said,
            "item_id": "msg_1",
            "completion_id": chat,
        }
        for route in [*(OPERATIONS.keys() - SCORES.keys() - FORMS - ENDLESS - set(later) - set(unloads)), *later]:
            await ask(http, route, "tiny", **ids)
        for route in unloads:
            await ask(http, ("POST", route[1].replace("unload", "load")), "tiny")
            await ask(http, route, "tiny")


@pytest.mark.parametrize("route", SCORES)
async def test_every_score_is_like_its_example(http_of: HttpOf, route: Operated) -> None:
    limits = SCORES[route]
    engine = EncodingEngine(
        lambda _request, _index: [], encoders.files(), limits, vector=lambda _request: [0.5] * limits.width
    )
    async with serving(engine) as served:
        await ask(http_of(served), route, "encoder")


def test_every_route_has_an_example_of_its_answer_and_a_shape_that_it_has() -> None:
    documented = described()
    for (_, path), operation in OPERATIONS.items():
        plain = path.replace(":path", "")
        for method in documented["paths"][plain].values():
            media = method["responses"]["200"]["content"][operation.media_type]
            Draft202012Validator(media["schema"]).validate(media["example"])
            if media["example"] is not None:
                assert media["schema"], path


def test_every_example_is_a_body_that_its_route_accepts() -> None:
    for (method, path), operation in OPERATIONS.items():
        assert operation.summary.endswith("."), path
        if operation.body is not None:
            assert method == "POST" or path == "/get_weights_by_name", "SGLang reads a body of one GET route"
            assert issubclass(operation.body, BaseModel)
            assert operation.example, path
            operation.body.model_validate(operation.example)


def test_every_field_of_a_body_is_described() -> None:
    schemas = described()["components"]["schemas"]
    for operation in OPERATIONS.values():
        if operation.body is not None:
            assert set(schemas[operation.body.__name__]["properties"]) == set(operation.body.model_fields)


REFUSED = [
    pytest.param(route, head, body, status, id=f"{route[1]}-{status}")
    for route, operation in OPERATIONS.items()
    for head, body, status in [
        ({}, b"{}", 401),
        ({"authorization": "Bearer boss", "content-type": "text/plain"}, b"{}", 415),
        ({"authorization": "Bearer boss", "content-type": "application/json"}, b"[" * 99999, 413),
        ({"authorization": "Bearer user", "content-type": "application/json"}, b'{"abort_all": true}', 403),
    ]
    if (status != 401 or route[1] not in {"/health", "/live", "/", "/docs"})
    and (status not in {413, 415} or operation.body is not None)
    and (status != 403 or operation.admin)
]


@pytest.mark.parametrize(("route", "head", "body", "status"), REFUSED)
async def test_refusals_are_as_they_are_described(
    engine_of: EngineOf, http_of: HttpOf, route: Operated, head: dict[str, str], body: bytes, status: int
) -> None:
    documented = described()
    method, path = route[0].lower(), route[1].replace(":path", "")
    [media] = documented["paths"][path][method]["responses"][str(status)]["content"].values()
    config = HttpConfig(api_key=("user",), admin_key=("boss",), max_body_bytes=4096)
    async with serving(engine_of(), config) as served:
        answer = await http_of(served).request(route[0], path, content=body, headers=head)
    assert answer.status_code == status
    schema = documented["components"]["schemas"][media["schema"]["$ref"].rpartition("/")[2]]
    Draft202012Validator(schema).validate(answer.json())


def test_statuses_are_described_where_they_occur() -> None:
    documented = described()
    for (method, path), operation in OPERATIONS.items():
        told = set(documented["paths"][path.replace(":path", "")][method.lower()]["responses"])
        assert {"408", "413", "415"} & told == ({"408", "413", "415"} if operation.body else set()), path
        assert ("403" in told) == operation.admin, path
        assert "431" in told


def of_type(name: str, schema: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all arrays, or objects, of a schema with their paths."""
    if isinstance(schema, dict) and schema.get("type") == name:
        yield where, schema
    inner = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for key, each in inner:
        yield from of_type(name, each, f"{where}.{key}")


def test_every_array_of_a_body_is_bounded() -> None:
    found = dict(of_type("array", described()["components"]["schemas"]))
    assert ".ChatRequest.properties.messages" in found
    assert not [where for where, array in found.items() if "maxItems" not in array]


def test_every_map_of_a_body_has_bounded_entries_and_its_keys_a_form() -> None:
    """Objects with values of one type are checked. Other objects are schemas and the like, bounded elsewhere."""
    schemas = described()["components"]["schemas"]
    maps = {
        where.split(".")[1] + "." + where.split(".")[3]: each
        for where, each in of_type("object", schemas)
        if isinstance(each.get("additionalProperties"), dict)
    }
    ids = {"pattern": "^[0-9]{1,10}$"}
    assert {where: (each.get("maxProperties"), each.get("propertyNames")) for where, each in maps.items()} == {
        "ChatRequest.logit_bias": (1024, ids),
        "CompletionRequest.logit_bias": (1024, ids),
        "NativeSampling.logit_bias": (1024, ids),
        "ChatRequest.metadata": (16, {"maxLength": 64}),
        "CreateResponse.metadata": (16, {"maxLength": 64}),
        "CreateConversation.metadata": (16, {"maxLength": 64}),
        "UpdateConversation.metadata": (16, {"maxLength": 64}),
        "UpdateChatCompletion.metadata": (16, {"maxLength": 64}),
    }
    assert all(each["additionalProperties"].keys() & {"maximum", "maxLength", "anyOf"} for each in maps.values())


@pytest.mark.parametrize(("key", "valid"), [("5", True), ("0123456789", True), ("-1", False), ("01234567890", False)])
def test_the_form_of_a_token_id_is_the_one_that_is_checked(key: str, valid: bool) -> None:
    schemas = described()["components"]["schemas"]
    body = {"model": "tiny", "prompt": "hello", "logit_bias": {key: 1}}
    told = Draft202012Validator({"$ref": "#/$defs/CompletionRequest", "$defs": schemas}).is_valid(body)
    try:
        CompletionRequest.model_validate(body)
        taken = True
    except ValidationError:
        taken = False
    assert told == taken == valid
