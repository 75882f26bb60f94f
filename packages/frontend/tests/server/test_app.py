"""Statuses, keys, limits, and the routes that do not generate."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.http import request_body
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


TYPES = {
    **dict.fromkeys((400, 401, 403, 404, 405, 408, 413, 415), "invalid_request_error"),
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def check_error(answer: httpx2.Response, status: int, code: str | None) -> dict[str, Any]:
    """Check that an error is OpenAI's object, with a string or null as its code."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    [(name, error)] = answer.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == TYPES[status]
    return dict(error)


async def test_rule_15_statuses(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(max_body_bytes=2000)) as served:
        http = http_of(served)
        check_error(await http.get("/nowhere"), 404, None)
        check_error(await http.get("/v1/nowhere"), 404, None)
        check_error(await http.get("/v1/completions"), 405, "method_not_allowed")
        check_error(await http.post(CHAT, json={**BODY, "model": "other"}), 404, "model_not_found")
        check_error(await http.post(CHAT, json={**BODY, "user": "x" * 2000}), 413, "request_too_large")
        check_error(await http.post(CHAT, content=b"model=tiny"), 415, "unsupported_media_type")
        form = {"content-type": "application/x-www-form-urlencoded"}
        check_error(await http.post(CHAT, content=b"model=tiny", headers=form), 415, "unsupported_media_type")
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        error = check_error(await http.post(CHAT, content=b"\x1f\x8b", headers=packed), 415, "unsupported_media_type")
        assert "Content-Encoding" in error["message"]


async def test_rule_15_a_body_without_a_length_is_bounded_too(engine_of: EngineOf, http_of: HttpOf) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 1000

    async with serving(engine_of(), HttpConfig(max_body_bytes=2000)) as served:
        answer = await http_of(served).post(CHAT, content=endless(), headers={"content-type": "application/json"})
    check_error(answer, 413, "request_too_large")


async def test_a_body_that_does_not_arrive_is_not_waited_for(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
    async with serving(engine_of()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b"{")
        answer = await reader.readuntil(b"}}")
        writer.close()
    assert b" 408 " in answer.splitlines()[0]
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1,2", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b"\xff", b"{'a':1}", b'{"a":"\\ud800"}'],
)
async def test_rule_15_what_is_not_standard_json_is_refused(engine_of: EngineOf, http_of: HttpOf, body: bytes) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(CHAT, content=body, headers={"content-type": "application/json"})
    assert "JSON" in check_error(answer, 400, None)["message"]


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b'"text"'])
async def test_rule_15_json_that_is_no_object_is_refused(engine_of: EngineOf, http_of: HttpOf, body: bytes) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(CHAT, content=body, headers={"content-type": "application/json"})
    check_error(answer, 400, "invalid_value")


async def test_of_equal_keys_the_last_counts(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = json.dumps(BODY)[:-1] + ', "model": "other"}'
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(CHAT, content=body, headers={"content-type": "application/json"})
    check_error(answer, 404, "model_not_found")


async def test_rule_15_503_and_retry_after_while_nothing_is_ready(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, connect=False) as served:
        http = http_of(served)
        loading = await http.post(CHAT, json=BODY)
        assert check_error(loading, 503, "service_unavailable")
        assert loading.headers["retry-after"] == "1"
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/live")).status_code == 200
    async with serving(engine, max_waiting=0) as served:
        assert (await http_of(served).get("/health")).status_code == 200
        engine.down("scheduler-0")
        turned_away = await http_of(served).post(CHAT, json=BODY)
        check_error(turned_away, 503, "service_unavailable")
        assert turned_away.headers["retry-after"] == "1"
        assert (await http_of(served).get("/health")).status_code == 503
        assert served.manager.running == 0


async def test_rule_15_503_while_every_queue_is_full(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, max_waiting=0) as served:
        engine.full.add("scheduler-0")
        check_error(await http_of(served).post(CHAT, json=BODY), 503, "service_unavailable")
        assert served.manager.running == 0
        engine.full.clear()
        assert (await http_of(served).post(CHAT, json=BODY)).status_code == 200


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(engine_of: EngineOf, http_of: HttpOf) -> None:
    def faulty(request: object, index: int) -> Any:
        raise RuntimeError("a secret")

    async with serving(engine_of(faulty)) as served:
        error = check_error(await http_of(served).post(CHAT, json=BODY), 500, None)
    assert "secret" not in error["message"]


async def test_every_route_but_probes_and_the_page_is_closed_without_the_key(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("first", "second"))) as served:
        http = http_of(served)
        for path in ("/v1/models", "/server_info", "/nowhere", "/docs/x", "/openapi.json", "/health/x", "/health//"):
            check_error(await http.get(path), 401, "invalid_api_key")
        for path in (CHAT, "/v1/completions", "/generate", "/tokenize", "/detokenize"):
            check_error(await http.post(path, json={}), 401, "invalid_api_key")
        for wrong in ("first", "Basic first", "Bearer", "Bearer firs", "Bearer first second", "Bearer third"):
            check_error(await http.get("/v1/models", headers={"authorization": wrong}), 401, "invalid_api_key")
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/live")).status_code == 200


async def test_no_key_is_told_from_a_wrong_one(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("first",))) as served:
        http = http_of(served)
        missing = check_error(await http.get("/v1/models"), 401, "invalid_api_key")
        wrong = check_error(await http.get("/v1/models", headers={"x-api-key": "second"}), 401, "invalid_api_key")
    assert missing["message"] == "No API key provided: send it as 'Authorization: Bearer KEY'."
    assert wrong["message"] == "Incorrect API key provided."


async def test_keys_may_lie_in_a_file(engine_of: EngineOf, openai_of: OpenAIOf, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    async with serving(engine_of(), HttpConfig(api_key_file=keys)) as served:
        assert (await openai_of(served, api_key="two").models.list()).data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            await openai_of(served, api_key="three").models.list()


def test_a_file_without_keys_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="no key"):
        HttpConfig(api_key_file=tmp_path / "keys").api_keys()


@pytest.mark.parametrize(
    ("sent", "echoed"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("ä", False)]
)
async def test_request_ids_are_echoed_when_they_are_harmless(
    engine_of: EngineOf, http_of: HttpOf, sent: str, echoed: bool
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).get("/live", headers={b"x-request-id": sent.encode()})
    assert (answer.headers["x-request-id"] == sent) is echoed
    assert answer.headers["x-request-id"]


async def test_rule_16_models_are_listed_and_found_by_names_with_slashes(
    engine_of: EngineOf, openai_of: OpenAIOf
) -> None:
    async with serving(engine_of(), names=("org/tiny", "alias")) as served:
        client = openai_of(served)
        cards = (await client.models.list()).data
        assert [(card.id, card.object, card.owned_by) for card in cards] == [
            ("org/tiny", "model", "tercet"),
            ("alias", "model", "tercet"),
        ]
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
        with pytest.raises(openai.NotFoundError) as error:
            await client.models.retrieve("tiny")
        answer = await client.completions.create(model="alias", prompt="hello")
    assert error.value.code == "model_not_found"
    assert answer.model == "alias"
