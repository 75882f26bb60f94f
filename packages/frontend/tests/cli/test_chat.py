import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tercet.frontend.cli import main as cli
from tercet.frontend.cli.chat import ChatError, Conversation, Server, converse


class FakeServer(ThreadingHTTPServer):
    """Server that answers chat completions with scripted bytes and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models: list[str] = ["the-model", "other"]
        self.status = 200
        self.answer: list[bytes] = []
        self.hung_up = threading.Event()
        self.endless = False


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send(json.dumps({"data": [{"id": name} for name in self.server.models]}).encode())

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.keys.append(self.headers.get("Authorization"))
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(*self.server.answer)
        try:
            while self.server.endless:
                self._write(delta("again "))
        except OSError:
            self.server.hung_up.set()

    def _send(self, *pieces: bytes) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        for piece in pieces:
            self._write(piece)

    def _write(self, piece: bytes) -> None:
        self.wfile.write(piece)
        self.wfile.flush()


def delta(text: str | None, field: str = "content") -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {} if text is None else {field: text}}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.endless = False
    fake.shutdown()
    thread.join()
    fake.server_close()


def typed(*lines: str) -> Callable[[str], str]:
    """Return a reader that types these lines and then ends the input."""
    left = list(lines)

    def read(_: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


def talk(server: FakeServer, *lines: str, **options: Any) -> str:
    out: list[str] = []
    assert converse(Server(server.url), Conversation("m", **options), typed(*lines), out.append) == 0
    return "".join(out)


def test_a_reply_is_printed_as_it_comes_and_remembered(server: FakeServer) -> None:
    server.answer = [delta(""), delta("Hel"), delta("lo é"), delta(None), b'data: {"choices":[]}\n\n', DONE]
    assert "Hello é\n" in talk(server, "hi", "and?", "/exit", "never")
    assert len(server.asked) == 2
    assert server.asked[0] == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert server.asked[1]["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello é"},
        {"role": "user", "content": "and?"},
    ]


def test_reasoning_is_dimmed_on_a_terminal_and_not_kept_in_the_history(server: FakeServer) -> None:
    server.answer = [delta("Hm, ", "reasoning_content"), delta("yes.", "reasoning_content"), delta("Yes."), DONE]
    for terminal, shown in ((True, "\x1b[2mHm, yes.\x1b[22m\n\nYes.\n"), (False, "Yes.\n")):
        out: list[str] = []
        conversation = Conversation("m")
        converse(Server(server.url), conversation, typed("Is it?"), out.append, terminal=terminal)
        assert "".join(out).split("a reply.\n")[1] == f"{shown}\n"
        assert conversation.messages[-1] == {"role": "assistant", "content": "Yes."}


def test_the_terminal_is_as_it_was_after_thoughts_that_end_in_the_middle(server: FakeServer) -> None:
    server.answer = [delta("Hm", "reasoning_content"), b'data: {"error": {"message": "the model is gone"}}\n\n']
    out: list[str] = []
    converse(Server(server.url), Conversation("m"), typed("Is it?"), out.append, terminal=True)
    assert "".join(out).endswith("\x1b[2mHm\x1b[22m\nerror: the model is gone\n\n")


def test_reset_forgets_all_but_the_system_message(server: FakeServer) -> None:
    server.answer = [delta("ok"), DONE]
    talk(server, "one", "/reset", "two", system="Be short.", temperature=0.0, max_tokens=5)
    assert server.asked[1]["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "two"},
    ]
    assert server.asked[1]["temperature"] == 0.0
    assert server.asked[1]["max_completion_tokens"] == 5


def test_ctrl_c_stops_the_reply_hangs_up_and_keeps_what_was_read(server: FakeServer) -> None:
    server.answer, server.endless = [], True
    conversation = Conversation("m")
    out: list[str] = []

    def write(text: str) -> None:
        out.append(text)
        if text == "again " and out.count(text) == 3:
            raise KeyboardInterrupt

    assert converse(Server(server.url), conversation, typed("go on"), write) == 0
    assert server.hung_up.wait(20)
    assert "(stopped)" in "".join(out)
    assert conversation.messages[-1] == {"role": "assistant", "content": "again again again "}


def test_a_refusal_is_one_line_and_the_turn_is_forgotten(server: FakeServer) -> None:
    server.status = 400
    server.answer = [json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}}).encode()]
    assert "error: the server answers 400: too long\n" in talk(server, "hi", "again")
    assert len(server.asked[1]["messages"]) == 1


def test_a_failed_answer_ends_a_chat_that_is_not_interactive(server: FakeServer) -> None:
    server.status = 404
    server.answer = [json.dumps({"error": {"message": "The model 'nope' does not exist."}}).encode()]
    arguments = ["chat", "--url", server.url, "--model", "nope"]
    code = f"from tercet.frontend.cli import main as cli; raise SystemExit(cli.main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], input="hi\nagain\n", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr == "tercet: error: the server answers 404: The model 'nope' does not exist.\n"
    assert [each["model"] for each in server.asked] == ["nope"]


def test_ctrl_c_ends_what_nobody_is_there_to_go_on_with(server: FakeServer) -> None:
    server.answer, server.endless = [], True

    def write(text: str) -> None:
        if text == "again ":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converse(Server(server.url), Conversation("m"), typed("go on", "never"), write, interactive=False)
    assert server.hung_up.wait(20)
    assert len(server.asked) == 1


def test_an_error_in_the_middle_is_told(server: FakeServer) -> None:
    server.answer = [delta("Hel"), b'data: {"error": {"message": "the model is gone"}}\n\n']
    assert "Hel\nerror: the model is gone\n" in talk(server, "hi")


def test_a_broken_stream_is_told(server: FakeServer) -> None:
    server.answer = [delta("Hel"), b"data: {nonsense\n\n"]
    assert "does not answer like a server" in talk(server, "hi")


def test_what_a_model_writes_cannot_steer_the_terminal(server: FakeServer) -> None:
    server.answer = [delta("a\x1b[2Jb\x9bc\td\ne"), DONE]
    assert "a[2Jbc\td\ne\n" in talk(server, "hi")


def test_what_the_terminal_cannot_spell_ends_no_chat(server: FakeServer) -> None:
    server.answer = [delta("left \u2192 right"), DONE]
    command = [
        sys.executable,
        "-c",
        f"from tercet.frontend.cli import main as cli; cli.main(['chat', '--url', {server.url!r}])",
    ]
    done = subprocess.run(
        command,
        input=b"caf\xe9\n/exit\n",
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert b"left ? right" in done.stdout
    assert server.asked[0]["messages"] == [{"role": "user", "content": "caf\ufffd"}]
    assert done.stderr == b""


def test_unknown_commands_are_not_sent(server: FakeServer) -> None:
    assert "there are /reset and /exit" in talk(server, "/quit", "  ")
    assert server.asked == []


def test_the_key_and_the_first_model_are_used(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Server(server.url).first_model() == "the-model"
    server.answer = [DONE]
    assert list(Server(server.url, "s3cret").stream({})) == []
    assert server.keys == ["Bearer s3cret"]


def test_a_path_in_the_address_is_kept(server: FakeServer) -> None:
    assert Server(f"{server.url}/v1/").first_model() == "the-model"
    assert Server(server.url.removeprefix("http://")).first_model() == "the-model"


def test_a_server_without_models_is_told(server: FakeServer) -> None:
    server.models = []
    with pytest.raises(ChatError, match="lists no model"):
        Server(server.url).first_model()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1", "no server at http://127.0.0.1:1: Connection refused"),
        ("ftp://x", "not an http or https address"),
        ("http://x:port", "--url http://x:port"),
        ("http://", "not an http or https address"),
    ],
)
def test_no_server_is_one_clear_line(url: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tercet: error: ")
    assert text in error
    assert error.count("\n") == 1
