"""What is said where Triton is installed and cannot be used."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton")

from triton import knobs

from tercet.kernels import triton as kernels
from tercet.kernels.triton import missing_triton, trial

GPU = torch.device("cuda")


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU of compute capability 8.6 whose first kernel does as the test says; nothing is known of it after."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 6))
    kernels._tried.cache_clear()
    yield monkeypatch
    kernels._tried.cache_clear()


def make_trial_raise(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def look_up(_: torch.device) -> float:
        raise error

    monkeypatch.setattr(trial, "_look_up", look_up)


def test_the_first_kernel_gives_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted."""
    if missing := missing_triton(torch.device("cpu")):
        pytest.skip(missing)
    assert trial.fault(torch.device("cpu")) == ""
    monkeypatch.setattr(trial, "_look_up", lambda _: 0.0)
    assert trial.fault(torch.device("cpu")) == "Triton cannot be used: its first kernel gave 0.0, not 3"


def test_a_gpu_is_tried_once(ampere: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []

    def look_up(device: torch.device) -> float:
        tried.append(device)
        return 3.0

    ampere.setattr(trial, "_look_up", look_up)
    assert [missing_triton(GPU), missing_triton(GPU)] == ["", ""]
    assert tried == [GPU]


def test_an_older_gpu_is_not_tried(ampere: pytest.MonkeyPatch) -> None:
    ampere.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    make_trial_raise(ampere, AssertionError("it was"))
    assert missing_triton(GPU).endswith("capability 8.0 or later, and this has 7.5")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs."),
            "it finds no C compiler: install gcc, or name one in CC",
        ),
        (
            PermissionError(13, "Permission denied", "/kernels/cache/x"),
            "the folder of its kernels (/kernels/cache; another is named in TRITON_CACHE_DIR) cannot be written: "
            "[Errno 13] Permission denied: '/kernels/cache/x'",
        ),
        (
            OSError(30, "Read-only file system", "/kernels"),
            "the folder of its kernels (/kernels/cache; another is named in TRITON_CACHE_DIR) cannot be written: "
            "[Errno 30] Read-only file system: '/kernels'",
        ),
        (
            PermissionError(13, "Permission denied", "/packages/triton/ptxas"),
            "PermissionError: [Errno 13] Permission denied: '/packages/triton/ptxas'",
        ),
        (FileNotFoundError(2, "No such file", "/sbin/ldconfig"), "it needs /sbin/ldconfig, which is not there"),
        (
            AssertionError("libcuda.so cannot found!\nPlease."),
            "it finds no libcuda.so.1: run ldconfig, or name its folder in TRITON_LIBCUDA_PATH",
        ),
        (
            ImportError("cuda_utils.so: failed to map segment from shared object"),
            "the folder of its kernels (/kernels/cache; another is named in TRITON_CACHE_DIR) may allow nothing to be "
            "run from it: cuda_utils.so: failed to map segment from shared object",
        ),
        (RuntimeError("PTXASError"), "RuntimeError: PTXASError"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(error: Exception, why: str, ampere: pytest.MonkeyPatch) -> None:
    ampere.setattr(knobs.cache, "dir", "/kernels/cache")
    make_trial_raise(ampere, error)
    assert missing_triton(GPU) == f"Triton cannot be used: {why}"


@pytest.mark.parametrize("there", [True, False])
def test_a_compiler_that_fails_may_lack_pythons_headers(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if there:
        (tmp_path / "Python.h").touch()
    said = trial.explain(CalledProcessError(1, ["/usr/bin/gcc", "driver.c", "-l:libcuda.so.1"]))
    assert said.startswith("/usr/bin/gcc failed" if there else f"there is no Python.h in {tmp_path}: install")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_device_that_fails_is_not_triton_missing(error: Exception, ampere: pytest.MonkeyPatch) -> None:
    """Its server would start on torch, and stay there."""
    make_trial_raise(ampere, error)
    with pytest.raises(type(error)):
        missing_triton(GPU)


def test_triton_names_a_compiler_that_is_not_there_as_we_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("triton.runtime.build")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError) as caught:
        build._build("x", "x.c", "/tmp", [], [], [], [])
    assert "it finds no C compiler" in trial.explain(caught.value)
