"""Every invalid request gets the OpenAI error body with a 4xx, and the server continues."""

import contextlib
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server_process import Server

USER = [{"role": "user", "content": "hello"}]


def post(server: Server, path: str, body: bytes) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"\xff\xfe\x00", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b"", 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": "hello"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, 400),
        ("/v1/chat/completions", {"messages": USER, "temperature": "hot"}, 400),
        (
            "/v1/chat/completions",
            b'{"model":"M","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
            400,
        ),
        ("/v1/chat/completions", b'{"model": "M", "messages": [{"role":"user","content":"x"}], "top_p": 1e999}', 400),
        ("/v1/chat/completions", {"messages": USER, "n": 10**9}, 400),
        ("/v1/chat/completions", {"messages": USER, "stop": ["a"] * 65}, 400),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": -1}, 400),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 10**9}, 400),
        ("/v1/chat/completions", {"messages": USER, "logit_bias": {"x": 1}}, 400),
        ("/v1/chat/completions", {"messages": USER, "logit_bias": {"99999999": 1}}, 400),
        ("/v1/chat/completions", {"messages": USER, "no_such_parameter": 1}, 400),
        ("/v1/chat/completions", {"messages": USER, "stream_options": {"include_usage": True}}, 400),
        ("/v1/chat/completions", {"messages": USER, "top_logprobs": 3}, 400),
        ("/v1/chat/completions", {"messages": USER, "model": "nobody/knows"}, 404),
        ("/v1/completions", {"prompt": [10**9], "max_tokens": 1}, 400),
        ("/v1/completions", {"prompt": [-1], "max_tokens": 1}, 400),
        ("/v1/completions", {"prompt": "word " * 20_000, "max_tokens": 1}, 400),
        ("/v1/nothing", {}, 404),
    ],
)
def test_nonsense_is_refused_in_openai_words(server: Server, model: str, path: str, body: Any, status: int) -> None:
    if isinstance(body, dict):
        data = json.dumps({"model": model, **body}).encode()
    else:
        data = body.replace(b'"M"', json.dumps(model).encode())
    got, answer = post(server, path, data)
    assert got == status, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["message"]
    assert "Traceback" not in json.dumps(answer)
    assert post(server, "/tokenize", json.dumps({"model": model, "prompt": "hi"}).encode())[0] == 200
