"""The description of the routes is whole, valid, and true in its examples."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import Route

from tercet.frontend.access import Access
from tercet.frontend.openapi import document
from tercet.frontend.operations import OPERATIONS
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


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
        assert isinstance(access, Access)
        assert isinstance(access.app, FastAPI)
        routes = {
            (method, route.path)
            for route in access.app.routes
            if isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}
        }
    assert routes == set(OPERATIONS)


async def test_it_is_served(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).get("/openapi.json")
    assert answer.status_code == 200
    described = answer.json()
    assert described["openapi"].startswith("3.1")
    known = described["components"]["schemas"]
    assert {ref.rpartition("/")[2] for ref in refs(described)} <= set(known)
    assert described["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"


def test_every_example_is_a_body_that_its_route_accepts() -> None:
    for (method, path), operation in OPERATIONS.items():
        assert operation.summary.endswith("."), path
        if operation.body is not None:
            assert method == "POST"
            assert issubclass(operation.body, BaseModel)
            assert operation.example, path
            operation.body.model_validate(operation.example)


def test_every_field_of_a_body_is_described() -> None:
    schemas = document(OPERATIONS)["components"]["schemas"]
    for operation in OPERATIONS.values():
        if operation.body is not None:
            assert set(schemas[operation.body.__name__]["properties"]) == set(operation.body.model_fields)
