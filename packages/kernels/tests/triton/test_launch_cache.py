"""What `launch` gives a GPU is what Triton would give it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are launched by triton")


@pytest.fixture(scope="module")
def lines() -> dict[str, str]:
    """By case, whether all launches were the same, and how often Triton was asked by the first three.

    By operation, how many kernels it launches, and how often Triton was asked when it was called once more.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("launched_again.py"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_launches_are_those_of_triton_which_is_asked_once(lines: dict[str, str]) -> None:
    """Of tensors that begin elsewhere, are absent or of other types, and of other numbers, constants and options."""
    cases = [said for name, said in lines.items() if name.startswith("case")]
    assert len(cases) == 14
    assert set(cases) == {"same 1 0 0", "same 0 0 0"}
    assert cases.count("same 0 0 0") == 1  # what the first case has launched


def test_a_kernel_runs_on_the_stream_and_device_that_are_current(lines: dict[str, str]) -> None:
    assert lines["stream"] == "same 0 0 0"
    assert lines["device"] == "same 1 0 0"


def test_hooks_of_launches_are_called(lines: dict[str, str]) -> None:
    assert lines["hooked"] == "same 1 1 1"
    assert lines["unhooked"] == "same 0 0 0"


def test_repeated_prefill_and_sampling_launches_skip_triton(lines: dict[str, str]) -> None:
    kernels = {"moe-prefill": 5, "moe-mxfp4-prefill": 5, "sample-filters": 10, "likeliest": 2, "logprobs": 2}
    kernels["penalties"] = 1
    assert {name: lines[name] for name in kernels} == {name: f"{count} 0" for name, count in kernels.items()}
