import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packages.frontend.tests.media.hearing import FORM
from tercet.frontend.supervisor.options import ConfigError
from tercet.frontend.supervisor.run_directory import run_directory
from tercet.frontend.supervisor.serve import listen, welcome
from tercet.protocol.messages.values import ModelLimits, Task

SERVE = Path(__file__).parents[1] / "parts" / "serve.py"


class Server:
    """Process of `tercet serve` with tiny parts."""

    def __init__(self, tmp: Path, *arguments: str) -> None:
        self.tmp = tmp
        with (tmp / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVE), *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "TMPDIR": str(tmp)},
                text=True,
            )
        assert self.process.stdout
        self.out = self.process.stdout

    def address(self) -> tuple[str, int]:
        """Wait for the line with the URL, and return the address."""
        line = self.out.readline()
        assert line.startswith("ready at http://"), self.err
        host, port = line.split()[2].removeprefix("http://").split(":")
        assert self.out.readline().startswith("curl ")
        return host, int(port)

    @property
    def err(self) -> str:
        return (self.tmp / "stderr").read_text()

    def children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture(autouse=True)
def interrupted() -> Iterator[None]:
    """Restore SIGINT: a shell without a terminal starts background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start_server(*arguments: str) -> Server:
        with run_directory() as directory:
            pass
        directory.mkdir(mode=0o700)
        servers.append(Server(directory, *arguments))
        return servers[-1]

    yield start_server
    for server in servers:
        children = server.children() if server.process.poll() is None else []
        server.process.kill()
        server.process.wait()
        server.out.close()
        wait_gone(*children)
        shutil.rmtree(server.tmp)


Start = Callable[..., Server]


def wait_gone(*pids: int) -> None:
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


def ask(address: tuple[str, int]) -> str:
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@pytest.fixture
def _no_nohup() -> Iterator[None]:
    """Restore SIGHUP, because a server inherits that it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_json_log_has_the_ready_lines_and_stdout_nothing(start: Start) -> None:
    server = start("serve", "serve", "answer", "--json")
    end = time.monotonic() + 30
    while "ready at http://" not in server.err:
        assert time.monotonic() < end, server.err
        time.sleep(0.01)
    assert server.stop(signal.SIGTERM) == 0
    assert server.out.read() == ""
    lines = [json.loads(line)["message"] for line in server.err.splitlines()]
    assert [line.split()[0] for line in lines if line.startswith(("ready at", "curl "))] == ["ready", "curl"]


@pytest.mark.usefixtures("_no_nohup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_leaves_nothing(start: Start, number: signal.Signals) -> None:
    server = start("serve", "serve", "answer")
    server.address()
    children = server.children()
    assert len(children) == 3
    assert [path.name for path in server.tmp.iterdir() if path.is_dir()]
    assert server.stop(number) == 0
    wait_gone(*children)
    assert [path for path in server.tmp.iterdir() if path.is_dir()] == []
    assert "Traceback" not in server.err


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_full_disk_under_its_output_stops_no_server(full: str, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    with open("/dev/full", "wb") as disk, (tmp_path / "output").open("wb") as file:
        command = [sys.executable, str(SERVE), "serve", "serve", "answer", str(port)]
        stdout, stderr = (disk, file) if full == "stdout" else (file, disk)
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        end = time.monotonic() + 30
        said = "curl " if full == "stderr" else "frontend-0 is ready"
        while said not in (tmp_path / "output").read_text():
            assert process.poll() is None, process.returncode
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_nothing_is_orphaned_when_the_supervisor_is_killed(start: Start) -> None:
    server = start("serve", "stubborn", "answer")
    server.address()
    children = server.children()
    assert len(children) == 3
    assert server.stop(signal.SIGKILL) == -9
    wait_gone(*children)


def test_the_port_stays_open_while_a_frontend_is_dead(start: Start) -> None:
    server = start("serve", "serve", "answer")
    address = server.address()
    assert "warning" not in server.err
    first, keys = ask(address).split()
    assert keys == "s3cret"
    os.kill(int(first), signal.SIGKILL)
    wait_gone(int(first))  # its last action may be to accept a connection
    second, _ = ask(address).split()
    assert second != first
    assert "frontend-0 died: killed by SIGKILL" in server.err


def test_keys_are_in_no_command_line_and_no_other_part(start: Start) -> None:
    server = start("serve", "serve", "answer")
    server.address()
    with_keys = 0
    for pid in server.children():
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        with_keys += b"s3cret" in Path(f"/proc/{pid}/environ").read_bytes()
    assert with_keys == 1


def test_a_second_ctrl_c_ends_it_at_once(start: Start) -> None:
    server = start("serve", "serve", "stubborn")
    server.address()
    children = server.children()
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert server.process.poll() is None
    assert server.stop(signal.SIGINT) == 130
    assert time.monotonic() - began < 5.0
    wait_gone(*children)


@pytest.mark.parametrize("option", ["--grace", "--extra-grace"])
def test_what_is_served_gets_the_grace_that_was_told(start: Start, option: str) -> None:
    """A frontend that does not end on SIGTERM gets a second one after the grace, and is killed two seconds later."""
    server = start("serve", "serve", "stubborn", option, "1")
    server.address()
    began = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0
    assert 3.0 <= time.monotonic() - began < 8.0


def test_a_start_that_fails_says_why_and_leaves_nothing(start: Start) -> None:
    server = start("refuse", "serve", "answer")
    assert server.process.wait(30) == 2
    assert server.out.read() == ""
    assert server.err.splitlines()[-1] == "tercet: error: scheduler-0: --dtype: no such dtype: float7"
    assert server.err.count("float7") == 1
    assert [path for path in server.tmp.iterdir() if path.is_dir()] == []


def test_a_taken_port_is_refused_in_one_line(start: Start) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        server = start("serve", "serve", "answer", str(port))
        assert server.process.wait(30) == 1
        assert server.err == f"tercet: error: --host 127.0.0.1 --port {port}: Address already in use\n"


def test_a_server_that_anybody_can_use_is_warned_of(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_ADMIN_KEYS", "which no part inherits")
    server = start("serve", "serve", "answer", "--open")
    address = server.address()
    assert "warning: without --api-key everybody who reaches http://127.0.0.1:" in server.err
    assert ask(address).endswith(" no keys")


def test_a_server_whose_keys_lie_in_a_file_is_not_called_open(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("s3cret\n")
    server = start("serve", "serve", "answer", "--key-file", str(tmp_path / "keys"))
    assert server.out.readline().startswith("ready at ")
    assert "Authorization: Bearer" in server.out.readline()
    assert "warning" not in server.err


def test_an_unknown_host_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 --port 0: Cannot assign requested address$"):
        listen("192.0.2.1", 0)


def test_ipv6_can_be_listened_on() -> None:
    with listen("::1", 0) as listener:
        assert listener.family is socket.AF_INET6


def test_the_line_to_copy_is_a_valid_command() -> None:
    ready, line = welcome("http://127.0.0.1:1", 'it\'s a "model"', True, 3.21).splitlines()
    assert ready == "ready at http://127.0.0.1:1 in 3.2 s"
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/chat/completions"]
    assert "Authorization: Bearer $TERCET_API_KEY" in words
    assert json.loads(words[-1])["model"] == 'it\'s a "model"'
    assert "Authorization" not in welcome("u", "m", False, 1.0)


def test_the_address_of_grpc_is_shown() -> None:
    first = welcome("http://127.0.0.1:2", "m", False, 1.0, grpc="127.0.0.1:1").splitlines()[0]
    assert first == "ready at http://127.0.0.1:2 in 1.0 s, gRPC at 127.0.0.1:1"


@pytest.mark.parametrize(("task", "path"), [(Task.EMBED, "embeddings"), (Task.CLASSIFY, "classify")])
def test_the_line_to_copy_asks_for_what_the_model_gives(task: Task, path: str) -> None:
    limits = ModelLimits(model="m", context_length=9, vocab_size=9, max_total_tokens=9, task=task)
    words = shlex.split(welcome("http://u", "m", False, 1.0, limits).splitlines()[1])
    assert words[1] == f"http://u/v1/{path}"
    assert json.loads(words[-1]) == {"model": "m", "input": "Hello"}


def test_the_line_to_copy_sends_audio_to_a_model_that_takes_it() -> None:
    limits = ModelLimits(model="m", context_length=9, vocab_size=9, max_total_tokens=9, audio=FORM)
    words = shlex.split(welcome("http://u", "a model", True, 1.0, limits).splitlines()[1])
    assert words[1] == "http://u/v1/audio/transcriptions"
    assert words[-4:] == ["-F", "file=@audio.wav", "-F", "model=a model"]
    assert "Authorization: Bearer $TERCET_API_KEY" in words
