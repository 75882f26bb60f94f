"""What `launch` gives a GPU is what Triton would give it."""

from pathlib import Path

import pytest

from packages.kernels.tests.forks import Forks

pytest.importorskip("triton", reason="kernels are launched by triton")


@pytest.fixture(scope="module")
def lines(compiling: Forks) -> dict[str, str]:
    """By case, whether all launches were the same, and how often Triton was asked by the first three.

    By operation, how many kernels it launches, and how often Triton was asked when it was called once more.
    """
    done = compiling.run(str(Path(__file__).with_name("launch_cache_program.py")))
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


def test_prefills_and_sampling_hit_the_launch_cache(lines: dict[str, str]) -> None:
    kernels = {"moe-prefill": 5, "moe-mxfp4-prefill": 15, "sample-filters": 3, "likeliest": 2, "logprobs": 2}
    kernels["penalties"] = 1
    assert {name: lines[name] for name in kernels} == {name: f"{count} 0" for name, count in kernels.items()}
