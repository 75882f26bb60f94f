"""The command line: what cannot work ends the process with one line and status 2."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from packages.kernels.tests.forks import Forks
from tercet.kernels.device import missing_gpu
from tercet.scheduler.__main__ import EXIT_CONFIG, EXIT_SHORTAGE, app, main
from tercet.scheduler.config import (
    ConfigError,
    ExpertOptions,
    HostOptions,
    ModelOptions,
    ProcessOptions,
    ScheduleOptions,
)


@pytest.fixture
def listen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where to listen, in a directory whose path is shorter than that of a test's own."""
    return f"ipc://{tmp_path_factory.mktemp('run')}"


def complaint(options: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The line that these options are refused with."""
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == EXIT_CONFIG
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("tercet-scheduler: ")
    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--page-size", "0"], "--page-size must be at least 1, not 0"),
        (["--threads", "0"], "--threads must be at least 1, not 0"),
        (["--threads", "1025"], "--threads must be at most 1024, not 1025"),
        (["--kv-cache-bytes", "-5"], "--kv-cache-bytes must be at least 1"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size must be at least 1"),
        (["--drain-grace", "-1"], "--drain-grace"),
        (["--drain-grace", "nan"], "--drain-grace"),
        (["--max-running-requests", "0"], "--max-running-requests must be at least 1, not 0"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be 1 to 64, not 0"),
        (["--tensor-parallel-size", "65"], "--tensor-parallel-size must be 1 to 64, not 65"),
        (["--tensor-parallel-size", "2", "--executor", "fake"], "2: the fake executor has nothing to share"),
        (["--ep", "2"], "--expert-parallel-size 2 must divide --tensor-parallel-size 1"),
        (["--ep-size", "0"], "--expert-parallel-size must be at least 1, not 0"),
        (["--ep-num-redundant-experts", "1"], "--ep-num-redundant-experts needs --init-expert-location"),
        (["--expert-load-file", "x"], "--expert-load-file needs --expert-parallel-size above 1"),
        (["--enable-dp-attention"], "--enable-dp-attention needs --tensor-parallel-size above 1"),
        (
            ["--enable-dp-attention", "--tp", "2", "--pp", "2"],
            "--enable-dp-attention does not work with --pipeline-parallel-size 2",
        ),
        (["--enable-dp-attention", "--tp", "4", "--ep", "2"], "leave --expert-parallel-size 2 out"),
        (["--device", "tpu"], "--device must be cpu, auto, auto:N, cuda or cuda:N"),
        (["--device", "cpu:1"], "--device must be cpu, auto, auto:N, cuda or cuda:N"),
        (["--overlap", "7"], "--overlap"),
        (["--page-sise", "3"], "--page-sise"),
        (["--listen", "somewhere"], "'somewhere' is neither ipc://"),
        (["--peer", "a/b"], "'a/b' is no peer id"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(options, capfd)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context-length", "513"], "context_length 513 is beyond the model's 512"),
        (["--attention-backend", "none-such"], "--attention-backend none-such: must be auto, "),
        (["--kv-cache-bytes", "1"], "do not hold one page"),
        (["--kv-cache-bytes", "9999", "--mem-fraction-static", "0.5"], "both size the KV cache: give one of them"),
        (["--event-log", "/nonexistent/log"], "--event-log /nonexistent/log: No such file"),
    ],
)
def test_options_that_do_not_go_with_the_model_are_refused(
    options: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    checkpoints: Callable[[str], Path],
    listen: str,
) -> None:
    common = ["--model", str(checkpoints("llama")), "--device", "cpu", "--listen", listen]
    assert words in complaint([*common, *options], capfd)


def test_what_transformers_runs_is_not_shared(
    capfd: pytest.CaptureFixture[str], checkpoints: Callable[[str], Path], tmp_path: Path, listen: str
) -> None:
    for file in checkpoints("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "CohereForCausalLM"))
    options = ["--model", str(tmp_path), "--device", "cpu", "--listen", listen, "--tensor-parallel-size", "2"]
    assert "--tensor-parallel-size 2: CohereForCausalLM is transformers' own" in complaint(options, capfd)


def test_a_model_that_is_nowhere_is_refused(capfd: pytest.CaptureFixture[str], listen: str) -> None:
    words = "'/nonexistent' is neither a directory nor a Hugging Face id"
    assert words in complaint(["--model", "/nonexistent", "--listen", listen], capfd)


def test_a_model_whose_weights_do_not_fit_is_refused(
    capfd: pytest.CaptureFixture[str], checkpoints: Callable[[str], Path], tmp_path: Path, listen: str
) -> None:
    for file in checkpoints("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    options = ["--model", str(tmp_path), "--device", "cpu", "--listen", listen]
    assert "does not fit its config.json" in complaint(options, capfd)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("mimo_v2", "scoring_func", "softmax"),
        ("olmo_hybrid", "hidden_act", "relu"),
    ],
)
def test_a_field_that_would_change_answers_is_refused(
    family: str,
    field: str,
    value: str,
    capfd: pytest.CaptureFixture[str],
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    listen: str,
) -> None:
    for file in checkpoints(family).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    line = complaint(["--model", str(tmp_path), "--device", "cpu", "--listen", listen], capfd)
    assert f"config.json: {field}: {value!r} is not supported" in line


@pytest.mark.parametrize(
    ("text", "complaint_of"), [(None, "has no tokenizer.json"), ('{"version": "1.0", "model": {', "is not whole JSON")]
)
def test_a_model_without_its_tokenizer_is_refused(
    capfd: pytest.CaptureFixture[str],
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    listen: str,
    text: str | None,
    complaint_of: str,
) -> None:
    for file in checkpoints("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").unlink()
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    options = ["--model", str(tmp_path), "--executor", "fake", "--listen", listen]
    assert complaint_of in complaint(options, capfd)


def test_a_fake_executor_needs_the_sizes_of_a_model(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, listen: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    options = ["--model", str(tmp_path), "--executor", "fake", "--listen", listen]
    assert "lacks max_position_embeddings or vocab_size" in complaint(options, capfd)


SAMPLES: dict[type, dict[str, object]] = {
    ProcessOptions: {
        "peer": "s7",
        "listen": "ipc:///run/x",
        "advertise": "tcp://127.0.0.1:9",
        "keys": Path("/run/keys"),
        "insecure_loopback": True,
        "supervisor": "ipc:///run/s",
        "parent_fd": 5,
        "log_level": "debug",
        "log_format": "json",
        "drain_grace": 0.5,
        "event_log": "events",
    },
    ModelOptions: {
        "model": "somewhere",
        "executor": "fake",
        "dtype": "float16",
        "load_format": "dummy",
        "device": "cuda:1",
        "attention_backend": "torch_native",
        "kv_cache_dtype": "fp8_e4m3",
        "kv_cache_bytes": 1000,
        "page_size": 8,
        "context_length": 100,
    },
    ScheduleOptions: {
        "schedule_policy": "fcfs",
        "mem_fraction_static": 0.75,
        "max_total_tokens": 512,
        "max_running_requests": 9,
        "chunked_prefill_size": 64,
        "max_queued_requests": 10,
        "disable_radix_cache": True,
        "overlap": 1,
        "max_loras": 3,
        "max_lora_rank": 16,
        "logprobs_mode": "processed",
    },
    HostOptions: {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5", "dist_timeout": 7.0},
    ExpertOptions: {
        "expert_parallel_size": 2,
        "enable_dp_attention": True,
        "init_expert_location": Path("/run/loads"),
        "ep_num_redundant_experts": 3,
        "expert_load_file": Path("/run/new"),
    },
}


def test_every_option_can_be_given_on_the_command_line() -> None:
    words = []
    for samples in SAMPLES.values():
        for name, value in samples.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    _, bound, _ = app.parse_args(words)
    for given, (kind, samples) in zip(bound.args or bound.arguments.values(), SAMPLES.items(), strict=True):
        assert isinstance(given, kind)
        assert {name: getattr(given, name) for name in samples} == samples
        assert len(fields(kind)) <= 18


def test_limits_are_checked_however_the_options_are_made() -> None:
    for make in (lambda: ModelOptions(page_size=0), lambda: ProcessOptions(drain_grace=float("inf"))):
        with pytest.raises(ConfigError):
            make()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Yield a process that has imported what a scheduler imports."""
    forks = Forks("tercet.scheduler.wiring", "tercet.scheduler.executor.tp_worker", env=os.environ)
    yield forks
    forks.close()


@pytest.mark.skipif(not missing_gpu(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused_before_a_model_is_fetched(listen: str, forks: Forks) -> None:
    """In a process of its own: it leaves a thread."""
    options = ["--listen", listen, "--model", "nobody/nothing", "--device", "cuda"]
    ended = forks.run("-m", "tercet.scheduler", *options, check=False)
    assert ended.returncode == EXIT_CONFIG
    assert ended.stderr.splitlines()[-1] == f"tercet-scheduler: --device cuda: {missing_gpu()}"


BUSY = """
from tercet.kernels.errors import BusyDeviceError
from tercet.scheduler.__main__ import main
from tercet.scheduler.device import devices

def missing_gpu(_):
    raise BusyDeviceError("GPU 0 cannot be used now: it is busy")

devices.missing_gpu = missing_gpu
main()
"""
FULL = """
import torch
from tercet.scheduler.__main__ import main
from tercet.scheduler.executor import loading

def build_model(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.")

loading.build_model = build_model
main()
"""


@pytest.mark.parametrize(
    ("program", "device", "said"),
    [
        (BUSY, "cuda", "--device cuda: GPU 0 cannot be used now: it is busy"),
        (BUSY, "auto", "--device auto: GPU 0 cannot be used now: it is busy"),
        (FULL, "cpu", "no memory for the model's weights: CUDA out of memory."),
    ],
)
def test_what_the_machine_does_not_give_now_is_worth_another_start(
    program: str, device: str, said: str, checkpoints: Callable[[str], Path], listen: str, forks: Forks
) -> None:
    """It may be a process that is about to leave which holds the GPU, or its memory."""
    options = ["--listen", listen, "--model", str(checkpoints("llama")), "--device", device]
    ended = forks.run("-c", program, *options, check=False)
    assert ended.stderr.splitlines()[-1] == f"tercet-scheduler: {said}"
    assert ended.returncode == EXIT_SHORTAGE


def test_a_dry_run_needs_a_config_alone(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints("llama") / "config.json").read_bytes())
    command = [sys.executable, "-m", "tercet.scheduler", "dry-run", "--model", str(tmp_path), "--tp", "2", "--pp", "3"]
    for memory, code, words in ((1 << 30, 0, "fits: "), (1000, 1, "does not fit: rank ")):
        ended = subprocess.run([*command, "--memory", str(memory)], capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
        assert "ranks: 6 (3 stages of 2), hosts: 1" in ended.stdout
        assert any(line.startswith(words) for line in ended.stdout.splitlines())
    ended = subprocess.run([*command, "--tp", "5"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
