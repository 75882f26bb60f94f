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
def output(either: Server, script: Path) -> dict[str, Any]:
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


def test_models_are_listed(output: dict[str, Any], either: Server) -> None:
    assert output["models"] == [either.model()]


def test_a_stream_is_the_same_text_in_pieces(output: dict[str, Any], either: Server, server: Server) -> None:
    assert output["text"]
    assert either is not server or "three" in output["text"]
    assert output["streamed"] == output["text"]
    assert output["pieces"] > 1, "of 200 tokens: on a busy machine many come at once"
    assert output["usage"][0] == output["usage"][1] > 0


def test_a_text_goes_on(output: dict[str, Any]) -> None:
    assert output["completion"]


def test_an_answer_follows_its_schema(output: dict[str, Any]) -> None:
    assert output["structured"]["finish"] in {"stop", "length"}
    if output["structured"]["finish"] == "stop":
        answer = json.loads(output["structured"]["text"])
        assert isinstance(answer["name"], str)
        assert isinstance(answer["wanted"], bool)


def test_a_call_that_streams_follows_its_schema(output: dict[str, Any]) -> None:
    [call] = output["called"]["calls"]
    assert output["called"]["finish"] == "tool_calls"
    assert call["name"] == "keep"
    assert json.loads(call["arguments"]).keys() == {"name", "wanted"}


def test_a_response_streams_in_order(output: dict[str, Any]) -> None:
    response = output["response"]
    assert response["text"] == output["short"]
    assert response["status"] in {"completed", "incomplete"}
    assert response["events"] == list(range(len(response["events"])))
    assert len(response["events"]) > 2


def test_an_error_is_of_the_right_class(output: dict[str, Any]) -> None:
    assert output["refused"] == {"known": True, "status": 404, "code": "model_not_found"}


def test_a_client_that_left_leaves_nothing_behind(output: dict[str, Any], either: Server) -> None:
    either.wait_for(lambda load: load["running"] == load["queued"] == 0)
    assert either.get("/server_info")["requests_ended"]["client_gone"] == output["gone_before"] + 1
