"""Which errors say that a device computes nothing any more, and why there is none to compute on."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tercet.kernels import device
from tercet.kernels.device import default_device, describe_machine, has_failed, missing_gpu, sees_nvidia
from tercet.kernels.errors import BusyDeviceError


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (ValueError("CUDA error: it says so, but is none"), False),
        (AssertionError("Tensor-likes are not close!"), False),
    ],
)
def test_an_error_tells_whether_the_device_failed(error: Exception, failed: bool) -> None:
    assert has_failed(error) == failed


@pytest.mark.parametrize("answers", [True, False])
def test_a_device_that_does_not_answer_has_failed_whatever_the_error_says(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait() -> None:
        if not answers:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert has_failed(RuntimeError("of 4 graphs only 3 could be recorded")) != answers


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch with CUDA, on a machine with a GPU that computes."""
    volta = SimpleNamespace(name="Tesla V100", major=7, minor=0, total_memory=16 << 30)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: volta)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (9 << 30, 16 << 30))
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(device, "_compute", lambda _: None)
    return monkeypatch


def raising(error: Exception) -> object:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.mark.usefixtures("cuda")
def test_a_gpu_that_computes_is_taken() -> None:
    assert missing_gpu() == ""
    assert default_device() == torch.device("cuda")
    assert describe_machine()["gpu 0"] == "Tesla V100, sm70, 16 GiB, 9 GiB free"


@pytest.mark.usefixtures("cuda")
def test_a_gpu_that_cannot_be_asked_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", raising(RuntimeError("CUDA error: busy")))
    assert describe_machine()["gpu 0"] == "Tesla V100, sm70, 16 GiB"


@pytest.mark.parametrize(
    ("error", "visible", "why"),
    [
        (
            RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Please update it."),
            None,
            "The NVIDIA driver on your system is too old (found version 12020). Please update it",
        ),
        (RuntimeError("No CUDA GPUs are available"), "", "No CUDA GPUs are available (CUDA_VISIBLE_DEVICES is '')"),
        (
            RuntimeError("Found no NVIDIA driver on your system. Please check.\nMore."),
            None,
            "Found no NVIDIA driver on your system. Please check; "
            "a container gets it from its host, as by docker run --gpus all",
        ),
    ],
)
def test_driver_errors_have_the_text_of_torch(
    error: Exception, visible: str | None, why: str, cuda: pytest.MonkeyPatch
) -> None:
    def unavailable() -> bool:
        warnings.warn("CUDA initialization: many lines", stacklevel=1)
        return False

    cuda.setattr("torch.cuda.is_available", unavailable)
    cuda.setattr("torch.cuda.init", raising(error))
    cuda.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        cuda.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert missing_gpu() == why
    assert describe_machine()["gpu"] == f"none: {why}"
    assert default_device() == torch.device("cpu")


def test_torch_builds_without_cuda_are_named(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr("torch.version.hip", "7.2")
    assert "is for AMD's GPUs" in missing_gpu()
    cuda.setattr("torch.version.hip", None)
    cuda.setattr("torch.version.cuda", None)
    cuda.setattr("torch.cuda.is_available", lambda: False)
    assert "was built without CUDA" in missing_gpu()


def test_a_gpu_that_torch_has_no_kernels_for_is_none(cuda: pytest.MonkeyPatch) -> None:
    said = "CUDA error: no kernel image is available for execution on the device\nSearch for it.\n"
    cuda.setattr(device, "_compute", raising(torch.AcceleratorError(said)))
    assert "has no kernels that GPU 0 (Tesla V100, sm70) and its driver run, only sm_75, sm_80: " in missing_gpu()


@pytest.mark.parametrize("said", ["CUDA error: all devices are busy or unavailable", "CUDA out of memory"])
def test_a_gpu_that_others_hold_is_no_missing_one(said: str, cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(device, "_compute", raising(torch.AcceleratorError(f"{said}\nSearch for it.")))
    with pytest.raises(BusyDeviceError) as caught:
        missing_gpu()
    assert str(caught.value) == f"GPU 0 cannot be used now: {said}"


def test_gpus_that_wait_for_fabric_manager_are_busy(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr("torch.cuda.is_available", lambda: False)
    cuda.setattr("torch.cuda.init", raising(RuntimeError("CUDA call failed. Error 802: system not yet initialized")))
    with pytest.raises(BusyDeviceError, match="Error 802: system not yet initialized"):
        missing_gpu()


@pytest.mark.parametrize(
    ("vendor", "kind", "seen"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1af4", "0x030000", False)],
)
def test_a_gpu_is_seen_on_the_bus_of_a_machine_that_does_not_drive_it(
    vendor: str, kind: str, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    (card / "vendor").write_text(f"{vendor}\n")
    (card / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(device, "_BUS", tmp_path)
    monkeypatch.setattr(device, "_DRIVER_FILES", ())
    assert sees_nvidia() == seen
