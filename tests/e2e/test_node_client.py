"""The `openai` package of Node.js works with the server as Python's does."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server_process import Server

SCRIPT = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the client with the package it needs."""
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("Node.js is not installed")
    place = shutil.copytree(SCRIPT, tmp_path_factory.mktemp("node") / "client")
    install = [npm, "install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(install, cwd=place, check=True, timeout=240)
    return place / "client.mjs"


@pytest.fixture(scope="module")
def said(either: Server, script: Path) -> dict[str, Any]:
    """Return its output, and the number of requests that had lost their client before."""
    gone = either.get("/server_info")["requests_ended"].get("client_gone", 0)
    run = subprocess.run(
        ["node", script.name, f"{either.url}/v1", either.model()],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return {**result, "gone_before": gone}


def test_models_are_listed(said: dict[str, Any], either: Server) -> None:
    assert said["models"] == [either.model()]


def test_a_stream_is_the_same_text_in_pieces(said: dict[str, Any], either: Server, server: Server) -> None:
    assert said["text"]
    assert either is not server or "three" in said["text"]
    assert said["streamed"] == said["text"]
    assert said["pieces"] > 1, "of 200 tokens: on a busy machine many come at once"
    assert said["usage"][0] == said["usage"][1] > 0


def test_a_text_goes_on(said: dict[str, Any]) -> None:
    assert said["completion"]


def test_an_answer_follows_its_schema(said: dict[str, Any]) -> None:
    assert said["structured"]["finish"] in {"stop", "length"}
    if said["structured"]["finish"] == "stop":
        answer = json.loads(said["structured"]["text"])
        assert isinstance(answer["name"], str)
        assert isinstance(answer["wanted"], bool)


def test_a_call_that_streams_follows_its_schema(said: dict[str, Any]) -> None:
    [call] = said["called"]["calls"]
    assert said["called"]["finish"] == "tool_calls"
    assert call["name"] == "keep"
    assert json.loads(call["arguments"]).keys() == {"name", "wanted"}


def test_a_response_streams_in_order(said: dict[str, Any]) -> None:
    response = said["response"]
    assert response["text"] == said["short"]
    assert response["status"] in {"completed", "incomplete"}
    assert response["events"] == list(range(len(response["events"])))
    assert len(response["events"]) > 2


def test_an_error_is_of_the_right_class(said: dict[str, Any]) -> None:
    assert said["refused"] == {"known": True, "status": 404, "code": "model_not_found"}


def test_a_client_that_left_leaves_nothing_behind(said: dict[str, Any], either: Server) -> None:
    either.wait_for(lambda load: load["running"] == load["queued"] == 0)
    assert either.get("/server_info")["requests_ended"]["client_gone"] == said["gone_before"] + 1
