"""Names of devices, on machines with and without GPUs."""

import logging
from pathlib import Path

import pytest
import torch

from tercet.kernels import device as machine
from tercet.kernels.errors import BusyDeviceError
from tercet.scheduler.device import devices
from tercet.scheduler.device.devices import first_gpu, select_device, slow_dtype
from tercet.scheduler.models.config.model_config import computed_dtype

pytestmark = pytest.mark.usefixtures("other_devices")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Those that were made the current one, of a machine with three."""
    taken: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setattr(machine, "_compute", lambda _: None)
    return taken


@pytest.mark.parametrize(
    ("name", "device", "first"),
    [("auto", "cuda", 0), ("cuda", "cuda", 0), ("auto:2", "cuda:2", 2), ("cuda:1", "cuda:1", 1), ("cpu", "cpu", None)],
)
def test_a_gpu_that_is_named_becomes_the_current_one(
    name: str, device: str, first: int | None, gpus: list[torch.device]
) -> None:
    assert first_gpu(name) == first
    assert select_device(name) == torch.device(device)
    assert gpus == ([torch.device(device)] if ":" in name else [])


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["auto:3", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"--device {name}: this machine's GPUs are 3"):
        select_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_where_there_is_none_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ValueError, match=f"^--device {name}: torch .* was built without CUDA"):
        select_device(name)


@pytest.mark.parametrize("name", ["auto", "auto:5"])
def test_without_gpus_any_scheduler_is_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert select_device(name) == torch.device("cpu")


@pytest.mark.parametrize(("seen", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_why_a_gpu_is_not_used_is_said_once_and_loud_where_there_is_one(
    seen: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "missing_gpu", lambda _: "the driver is too old")
    monkeypatch.setattr(devices, "sees_nvidia", lambda: seen)
    with caplog.at_level(logging.INFO):
        assert [first_gpu("auto"), first_gpu("auto")] == [None, None]
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (level, "no GPU is used: the driver is too old")
    ]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_is_busy_now_never_makes_a_scheduler_one_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: int) -> str:
        raise BusyDeviceError("GPU 0 cannot be used now: CUDA error: out of memory")

    monkeypatch.setattr(devices, "missing_gpu", busy)
    with pytest.raises(ValueError, match=f"--device {name}: GPU 0 cannot be used now: CUDA error: out of memory$"):
        select_device(name)


@pytest.mark.parametrize(
    ("capability", "slow"), [((7, 0), "bfloat16"), ((7, 5), "bfloat16"), ((8, 0), ""), ((12, 0), "")]
)
def test_gpus_before_ampere_are_slow_in_bfloat16(
    capability: tuple[int, int], slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    assert slow_dtype(torch.device("cuda")) == slow
    assert slow_dtype(torch.device("cpu")) == "float16"


@pytest.mark.parametrize(
    ("wanted", "dtype", "said"),
    [
        ("auto", "float16", "weights saved in bfloat16 are computed in float16, which is faster on this GPU"),
        ("bfloat16", "bfloat16", "this GPU has no arithmetic for bfloat16"),
        ("float32", "float32", ""),
    ],
)
def test_a_t4_computes_what_was_saved_in_bfloat16_in_float16(
    wanted: str,
    dtype: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}')
    with caplog.at_level(logging.INFO):
        assert computed_dtype(tmp_path, wanted, torch.device("cuda")) == dtype
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
