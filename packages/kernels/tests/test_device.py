"""Which errors say that a device computes nothing any more."""

import pytest
import torch

from tercet.kernels.device import has_failed


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
