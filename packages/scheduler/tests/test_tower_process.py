"""Scheduler processes with a half of a model: the tower, or the rest."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.scheduler.tests.models.vision.qwen_checkpoint import IMAGE, SQUARE, write_qwen
from tercet.protocol.messages.encodings import EncodedMedia, EncodeMediaReq
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import Ready, Rejected, TokenizerFiles, TokenizerFilesReq
from tercet.protocol.messages.values import Role
from tercet.protocol.node import PeerDown, PeerReady
from tercet.protocol.testing import Listener, Network
from tercet.scheduler.config import ConfigError, ModelOptions
from tercet.scheduler.testing import request

PATIENCE = 60.0
HEIGHT, WIDTH = 2 * SQUARE, 3 * SQUARE
ARRAY = bytes(range(256)) * (3 * HEIGHT * WIDTH // 256) + bytes(3 * HEIGHT * WIDTH % 256)
SHA256 = hashlib.sha256(ARRAY).digest()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("tower") / "seeing", "Qwen3VL")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(heartbeat_interval=0.25, silence=10.0) as network:
        yield network


@pytest.fixture
def start(network: Network, directory: Path) -> Iterator[Callable[..., tuple[Listener, Ready, Any]]]:
    """Yield a function that starts a process and waits until it is ready."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*options: str) -> tuple[Listener, Ready, subprocess.Popen[bytes]]:
        frontend = Listener(network.node(Role.FRONTEND))
        command = [sys.executable, "-m", "tercet.scheduler", "--peer", "scheduler-0", "--device", "cpu"]
        command += ["--listen", f"ipc://{network.directory}", "--model", str(directory), "--dtype", "float32"]
        processes.append(subprocess.Popen([*command, *options], env={**os.environ, "OMP_NUM_THREADS": "1"}))
        ready = frontend.wait_for(PeerReady, "scheduler-0", timeout=PATIENCE).message
        assert isinstance(ready, PeerReady)
        return frontend, ready.ready, processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def test_an_encoder_gives_embeddings_and_takes_no_text(start: Callable[..., Any]) -> None:
    frontend, ready, process = start("--encoder-only")
    assert (ready.limits, ready.identity) == (None, None), "other frontends route nothing to it"
    form = ready.encoder
    assert (form.width, form.dtype) == (64 * 3, "float32"), "two layers of deepstack follow the last one"
    asked = EncodeMediaReq(
        rid="i", attempt=0, image=ImageInput(sha256=SHA256, height=HEIGHT, width=WIDTH, first=0, tokens=6)
    )
    for rid in ("i", "again"):
        frontend.node.send("scheduler-0", msgspec.structs.replace(asked, rid=rid), ARRAY)
    frames: dict[str, bytes] = {}
    while len(frames) < 2:
        delivery = frontend.wait_for(EncodedMedia, timeout=PATIENCE)
        assert delivery.message.finish is None
        [frame] = delivery.frames
        frames[delivery.message.rid] = bytes(frame)
    assert len(frames["i"]) == form.frame_bytes(6)
    assert frames["i"] == frames["again"]
    assert len({frames["i"][place : place + 64] for place in range(0, 640, 64)}) > 5
    frontend.node.send("scheduler-0", request("text", [1, 2]))
    refused = frontend.wait_for(Rejected, timeout=PATIENCE).message
    assert isinstance(refused, Rejected)
    assert (refused.rid, refused.code) == ("text", "invalid_request")
    frontend.node.send("scheduler-0", TokenizerFilesReq(id="t"))
    assert isinstance(frontend.wait_for(TokenizerFiles, timeout=PATIENCE).message, TokenizerFiles)
    process.send_signal(signal.SIGTERM)
    assert isinstance(frontend.wait_for(PeerDown, timeout=PATIENCE).message, PeerDown)
    assert process.wait(PATIENCE) == 0


def test_a_language_model_alone_takes_no_arrays(start: Callable[..., Any]) -> None:
    frontend, ready, _ = start("--language-only", "--kv-cache-bytes", "10000000")
    assert ready.limits is not None
    assert (ready.limits.images, ready.limits.sounds) == (None, None), "other frontends send it text alone"
    form = ready.limits.embeddings
    assert form is not None
    assert (form.width, form.dtype) == (64 * 3, "float32")
    image = ImageInput(sha256=SHA256, height=HEIGHT, width=WIDTH, first=1, tokens=6)
    asked = request("r", [1, *[IMAGE] * 6, 2], images=[image])
    frontend.node.send("scheduler-0", asked, ARRAY)
    refused = frontend.wait_for(Rejected, timeout=PATIENCE).message
    assert isinstance(refused, Rejected)
    assert (refused.code, refused.retry) == ("invalid_request", False)
    assert "embeddings and no arrays" in refused.message
    frontend.node.send("scheduler-0", msgspec.structs.replace(asked, embedded=True, attempt=1), ARRAY)
    refused = frontend.wait_for(Rejected, timeout=PATIENCE).message
    assert isinstance(refused, Rejected)
    assert "the embeddings do not fit" in refused.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"encoder_only": True, "language_only": True}, "give one of them"),
        ({"encoder_only": True, "tensor_parallel_size": 2}, "--tensor-parallel-size 2 is for models that generate"),
        ({"encoder_only": True, "pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is for models that generate"),
        ({"encoder_only": True, "quantization": "int8"}, "--quantization int8 is for models that generate"),
        ({"encoder_only": True, "kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 is for models"),
        ({"encoder_only": True, "kv_cache_bytes": 5}, "--kv-cache-bytes 5 is for models that generate"),
        ({"encoder_only": True, "task": "embed"}, "--task embed is for models that generate"),
        ({"encoder_only": True, "executor": "fake"}, "--encoder-only does not work with --executor fake"),
        ({"encoder_only": True, "load_format": "dummy"}, "--encoder-only does not work with --load-format dummy"),
        ({"language_only": True, "load_format": "dummy"}, "--language-only does not work with --load-format dummy"),
        ({"language_only": True, "executor": "fake"}, "--language-only does not work with --executor fake"),
    ],
)
def test_options_that_do_not_work_with_half_a_model_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelOptions(**options)
    ModelOptions(language_only=True, tensor_parallel_size=2, quantization="int8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--encoder-only"], "the model has no tower of images or sounds in prompts"),
        (["--language-only"], "the model takes no images or sounds in prompts"),
        (["--encoder-only", "--max-loras", "2"], "--max-loras 2: --encoder-only has the tower alone"),
        (["--encoder-only", "--event-log", "log"], "encoders have no event log"),
    ],
)
def test_a_model_without_a_tower_is_refused_in_one_line(options: list[str], words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tercet.scheduler", "--model", "embedded", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--listen", f"ipc://{tmp_path}", *options], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("tercet-scheduler: ")]
    assert words in line
