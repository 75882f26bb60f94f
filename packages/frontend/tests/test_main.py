"""Frontend process: options, and a chat over real sockets with simulated peers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from cyclopts import App

from packages.kernels.tests.forks import Forks
from tercet.frontend.config.config import FrontendConfig
from tercet.protocol.messages.messages import (
    BatchStrOutput,
    ControlReply,
    FirstTextRow,
    FrontendInbox,
    Heartbeat,
    LoadLoRAAdapterReq,
    Message,
    Ready,
    SchedulerInbox,
    SupervisorInbox,
    TokenizedGenerateReqInput,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    LoRAAdapter,
    ModelIdentity,
    ModelLimits,
    Phase,
    Role,
    pack_ints,
)
from tercet.protocol.node import NodeConfig, PeerDown, PeerReady, ThreadNode


def parse(*arguments: str) -> FrontendConfig:
    app = App()
    seen: list[FrontendConfig] = []

    @app.default
    def take(config: FrontendConfig = FrontendConfig()) -> None:
        seen.append(config)

    app(arguments, result_action="return_value")
    return seen[0]


def test_options_reach_their_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERCET_API_KEYS", "one\ntwo")
    config = parse(
        *("--peer", "f-1", "--listen", "ipc:///x", "--scheduler", "ipc:///x/scheduler-*", "--scheduler", "tcp://h:1"),
        *("--detokenizer", "ipc:///x/detokenizer-*", "--parent-fd=3", "--fd=4", "--served-model-name", "m"),
        *("--routing-policy", "least_loaded", "--log-level=debug", "--lora", "a=/a", "--lora=b=/b"),
    )
    assert config.serving.lora == ("a=/a", "b=/b")
    assert config.link.scheduler == ("ipc:///x/scheduler-*", "tcp://h:1")
    assert (config.link.peer, config.link.parent_fd, config.http.fd) == ("f-1", 3, 4)
    assert config.http.api_keys() == ("one", "two")
    assert (config.serving.served_model_name, config.serving.routing_policy) == (("m",), "least_loaded")


def idle(peer: str) -> Heartbeat:
    return Heartbeat(phase=Phase.IDLE)


class Peers:
    """Simulated supervisor, scheduler and detokenizer; the scheduler passes requests to the detokenizer's answer."""

    def __init__(
        self, directory: Path, files: dict[str, bytes], limits: ModelLimits, scheduler: str = "scheduler-0"
    ) -> None:
        listen = f"ipc://{directory}"
        self.directory = directory
        self.files = files
        self.url = ""
        self.ready = threading.Event()
        self.supervisor = ThreadNode(NodeConfig(Role.SUPERVISOR, "supervisor", listen), SupervisorInbox, idle)
        self.scheduler = ThreadNode(NodeConfig(Role.SCHEDULER, scheduler, listen), SchedulerInbox, idle)
        self.detokenizer = ThreadNode(NodeConfig(Role.DETOKENIZER, "detokenizer-0", listen), FrontendInbox, idle)
        self.asked = threading.Event()
        self.forgetful = False
        """Drop requests: heartbeats do not list them."""
        self.goodbye = ""
        self.finds_fault = ""
        """Reason to refuse adapters."""
        self.adapters: list[LoRAAdapter | None] = []
        """Adapters of the requests received."""
        self._stopped = False
        for node in (self.supervisor, self.scheduler, self.detokenizer):
            node.start()
        self.scheduler.set_ready(Ready(limits=limits, identity=ModelIdentity(weights="w")))
        self.detokenizer.set_ready(Ready())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        for node in (self.supervisor, self.scheduler, self.detokenizer):
            node.close()

    def _run(self) -> None:
        while not self._stopped:
            for delivery in self.supervisor.drain(0.01):
                if isinstance(delivery.message, PeerReady):
                    self.url = delivery.message.ready.url
                    self.ready.set()
                elif isinstance(delivery.message, PeerDown):
                    self.goodbye = delivery.message.reason
            for delivery in self.scheduler.drain(0.01):
                self._answer(delivery.source, delivery.message)
            self.detokenizer.drain(0)

    def _answer(self, frontend: str, message: object) -> None:
        match message:
            case TokenizerFilesReq():
                sums = [sha256(content).hexdigest() for content in self.files.values()]
                reply = TokenizerFiles(id=message.id, model="tiny", names=list(self.files), sha256=sums)
                self.scheduler.send(frontend, reply, *self.files.values())
            case TokenizedGenerateReqInput() if self.forgetful:
                self.asked.set()
            case LoadLoRAAdapterReq(id=number, adapter=adapter):
                fault, found = self.finds_fault, f"that of {adapter.path}"
                self.scheduler.send(frontend, ControlReply(id=number, ok=not fault, message=fault, sha256=found))
            case TokenizedGenerateReqInput():
                self.adapters.append(message.lora)
                self.detokenizer.send(frontend, says(message, "over real sockets"))


def says(request: TokenizedGenerateReqInput, text: str) -> Message:
    return BatchStrOutput(
        rids=[request.rid],
        indices=pack_ints([0]),
        attempts=pack_ints([request.attempt]),
        positions=pack_ints([0]),
        offsets=pack_ints([0, 1]),
        token_ids=pack_ints([5]),
        texts=[text],
        openings=[FirstTextRow(row=0, prompt_tokens=3, cached_tokens=0)],
        finishes={0: FinishReason(FinishType.STOP)},
    )


@pytest.fixture
def peers(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], limits: ModelLimits) -> Iterator[Peers]:
    directory = tmp_path_factory.mktemp("r")
    directory.chmod(0o700)
    played = Peers(directory, files, limits)
    yield played
    played.close()


def post(url: str, body: object, **headers: str) -> dict[str, object]:
    head = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.loads(answer.read()))


def refusal(url: str) -> urllib.error.HTTPError:
    """Repeat a request until it fails."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.HTTPError as error:
            return error
    raise TimeoutError(url)


def until_healthy(url: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.05)
    raise TimeoutError(url)


def until_listed(url: str, model: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            if model in {each["id"] for each in json.loads(answer.read())["data"]}:
                return
        time.sleep(0.05)
    raise TimeoutError(model)


def test_a_process_serves_and_ends_with_its_parent(peers: Peers) -> None:
    listen = f"ipc://{peers.directory}"
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "tercet.frontend", "--peer=frontend-0", f"--listen={listen}", "--port=0"]
    command += [f"--scheduler={listen}/scheduler-*", f"--detokenizer={listen}/detokenizer-*"]
    command += [f"--supervisor={listen}/supervisor.*", f"--parent-fd={ours}"]
    process = subprocess.Popen(command, pass_fds=[ours])
    os.close(ours)
    try:
        assert peers.ready.wait(30)
        until_healthy(peers.url)
        answer = post(f"{peers.url}/v1/completions", {"model": "tiny", "prompt": "hello"})
        assert answer["choices"][0]["text"] == "over real sockets"  # type: ignore[index]
        os.close(theirs)
        assert process.wait(15) == 0
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_model_of_no_use_ends_a_supervised_process_and_says_why(peers: Peers) -> None:
    """Otherwise its parent would wait ten minutes, and then report only that it was not ready."""
    peers.files = {**peers.files, "chat_template.jinja": b"{% for %}"}
    listen = f"ipc://{peers.directory}"
    command = [sys.executable, "-m", "tercet.frontend", "--peer=frontend-0", f"--listen={listen}", "--port=0"]
    command += [f"--scheduler={listen}/scheduler-*", f"--detokenizer={listen}/detokenizer-*"]
    command += [f"--supervisor={listen}/supervisor.*"]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    last = ended.stderr.decode().splitlines()[-1]
    said = "tercet-frontend: the tokenizer files of scheduler-0 are of no use: the chat template does not parse"
    assert last.startswith(said)


def test_a_stranger_of_no_use_ends_no_supervised_process(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], limits: ModelLimits
) -> None:
    """It joined from elsewhere: the supervisor's own schedulers may still serve."""
    directory = tmp_path_factory.mktemp("r")
    directory.chmod(0o700)
    peers = Peers(directory, {**files, "chat_template.jinja": b"{% for %}"}, limits, "scheduler-joined")
    command = [sys.executable, "-m", "tercet.frontend", "--peer=frontend-0", f"--listen=ipc://{directory}", "--port=0"]
    command += [f"--scheduler=ipc://{directory}/scheduler-*", f"--supervisor=ipc://{directory}/supervisor.*"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        said = next(line for line in process.stderr if "the tokenizer files of scheduler-joined are of no use" in line)
        assert " ERROR " in said
        process.terminate()
        process.communicate(timeout=15)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        peers.close()


def test_names_of_adapters_come_back_with_a_process_that_was_killed(
    peers: Peers, limits: ModelLimits, tmp_path: Path
) -> None:
    able = Ready(limits=msgspec.structs.replace(limits, max_loras=8), identity=ModelIdentity(weights="w"))
    peers.scheduler.set_ready(able)
    listen = f"ipc://{peers.directory}"
    command = [sys.executable, "-m", "tercet.frontend", "--peer=frontend-0", f"--listen={listen}", "--port=0"]
    command += [f"--scheduler={listen}/scheduler-*", f"--detokenizer={listen}/detokenizer-*"]
    command += [f"--supervisor={listen}/supervisor.*", "--admin-key=boss", "--lora=sonnet=/sonnet"]
    command += [f"--response-store={tmp_path}/r.sqlite"]
    for life in range(2):
        peers.ready.clear()
        process = subprocess.Popen([*command, *(["--require-lora"] if life == 0 else [])])
        try:
            assert peers.ready.wait(30)
            until_healthy(peers.url)
            if life == 0:
                listed = urllib.request.urlopen(f"{peers.url}/v1/models", timeout=5).read()
                assert b'"sonnet"' in listed, "ready means that it is there, too"
                body = {"lora_name": "haiku", "lora_path": "/haiku"}
                post(f"{peers.url}/load_lora_adapter", body, authorization="Bearer boss")
            answer = post(f"{peers.url}/v1/completions", {"model": "haiku", "prompt": "hello"})
            assert answer["model"] == "haiku"
            until_listed(peers.url, "sonnet")
            post(f"{peers.url}/v1/completions", {"model": "sonnet", "prompt": "hello"})
        finally:
            process.kill()
            process.wait()
    haiku, sonnet = (LoRAAdapter(path, f"that of {path}") for path in ("/haiku", "/sonnet"))
    assert peers.adapters == [haiku, sonnet, haiku, sonnet]


@pytest.mark.parametrize(
    ("most", "why"),
    [
        (8, "It cannot be read. scheduler-0: rank 65 is above 64.\n"),
        (0, "This server runs no adapters: its schedulers were started without --max-loras.\n"),
    ],
)
def test_an_adapter_that_is_required_and_refused_ends_the_process(
    peers: Peers, limits: ModelLimits, most: int, why: str
) -> None:
    able = Ready(limits=msgspec.structs.replace(limits, max_loras=most), identity=ModelIdentity(weights="w"))
    peers.finds_fault = "rank 65 is above 64"
    peers.scheduler.set_ready(able)
    listen = f"ipc://{peers.directory}"
    command = [sys.executable, "-m", "tercet.frontend", "--peer=frontend-0", f"--listen={listen}", "--port=0"]
    command += [f"--scheduler={listen}/scheduler-*", f"--detokenizer={listen}/detokenizer-*"]
    command += [f"--supervisor={listen}/supervisor.*", "--lora=sonnet=/sonnet", "--require-lora"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"tercet-frontend: --lora sonnet=/sonnet: {why}")
    assert not peers.ready.is_set()


def test_sigterm_lets_a_lost_request_be_redispatched_and_finish(peers: Peers) -> None:
    listen = f"ipc://{peers.directory}"
    command = [sys.executable, "-m", "tercet.frontend", "--peer=frontend-0", f"--listen={listen}", "--port=0"]
    command += [f"--scheduler={listen}/scheduler-*", f"--detokenizer={listen}/detokenizer-*"]
    command += [f"--supervisor={listen}/supervisor.*"]
    process = subprocess.Popen(command)
    try:
        assert peers.ready.wait(30)
        with urllib.request.urlopen(f"{peers.url}/health", timeout=5) as health:  # readiness was announced
            assert health.status == 200
        peers.forgetful = True
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, f"{peers.url}/v1/completions", {"model": "tiny", "prompt": "hello"})
            assert peers.asked.wait(10)
            process.send_signal(signal.SIGTERM)
            with refusal(f"{peers.url}/health") as error:
                assert (error.code, error.headers["retry-after"], error.headers["connection"]) == (503, "1", "close")
                assert b"about to leave" in error.read()
            assert process.poll() is None
            peers.forgetful = False
            assert answer.result(20)["choices"][0]["text"] == "over real sockets"  # type: ignore[index]
        assert process.wait(15) == 0
        while not peers.goodbye:
            time.sleep(0.01)
        assert peers.goodbye == "goodbye: stopped"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Yield forks of a process that has imported the frontend."""
    forks = Forks("tercet.frontend.wiring", "uvloop", env=os.environ)
    yield forks
    forks.close()


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "--listen=nonsense",
            "--host=256.0.0.1",
            "--api-key-file=/nowhere",
            "--chat-template=/nowhere",
            "--recovery-timeout=soon",
            "--nonsense",
        ),
        *("--response-store=/proc", "--response-store-days=-1", "--lora=haiku"),
        *("--sibling=../frontend-1", "--sibling=frontend-1"),
    ],
)
def test_options_that_cannot_work_end_the_process_with_2(wrong: str, forks: Forks) -> None:
    ended = forks.run("-m", "tercet.frontend", "--port=0", "--insecure-loopback", wrong, check=False)
    assert ended.returncode == 2
    assert wrong.partition("=")[2] in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("tercet-frontend: ")
    assert "Traceback" not in ended.stderr
