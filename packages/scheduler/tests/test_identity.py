"""Which schedulers may take over each other's requests: those whose models have one identity."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from tercet.protocol.messages.values import Task
from tercet.scheduler.config import ModelOptions, ScheduleOptions
from tercet.scheduler.device import devices
from tercet.scheduler.executor_factory import build_torch
from tercet.scheduler.model_files import model_identity
from tercet.scheduler.resolved_model import ResolvedModel, identity_of


def test_the_dtype_of_the_cache_decides_what_fits_and_who_may_take_over(checkpoints: Callable[[str], Path]) -> None:
    path = checkpoints("llama")
    pages, weights = [], []
    dtypes: tuple[Literal["bfloat16", "fp8_e4m3"], ...] = ("bfloat16", "fp8_e4m3")
    for dtype in dtypes:
        model = ModelOptions(model=str(path), device="cpu", kv_cache_dtype=dtype, kv_cache_bytes=1 << 16)
        executor = build_torch(
            model, ScheduleOptions(), ResolvedModel(path, "", Task.GENERATE), lambda *_: None, lambda: None
        )
        pages.append(executor.capacity.groups[0].pages)
        executor.close()
        weights.append(identity_of(model, ResolvedModel(path, "", Task.GENERATE)).weights)
    assert pages[1] == 2 * pages[0]
    assert weights[0] != weights[1]


@pytest.mark.usefixtures("other_devices")
def test_who_may_take_over_a_float16_model_depends_on_where_it_is_computed(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    config = path / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"float16"'))
    known = {dtype: model_identity(path, dtype) for dtype in ("float32", "bfloat16", "float16")}
    assert len({identity.weights for identity in known.values()}) == 3
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    for gpu, dtype, encoder in ((True, "float16", "float16"), (False, "bfloat16", "float32")):
        monkeypatch.setattr(devices, "missing_gpu", lambda _, gpu=gpu: "" if gpu else "there is none")
        devices.first_gpu.cache_clear()
        assert identity_of(ModelOptions(), ResolvedModel(path, "", Task.GENERATE)) == known[dtype]
        assert identity_of(ModelOptions(), ResolvedModel(path, "", Task.EMBED)) == known[encoder]
        assert identity_of(ModelOptions(dtype="float16"), ResolvedModel(path, "", Task.GENERATE)) == known["float16"]
        assert identity_of(ModelOptions(device="cpu"), ResolvedModel(path, "", Task.GENERATE)) == known["bfloat16"]


@pytest.mark.usefixtures("other_devices")
def test_a_bfloat16_model_on_an_old_gpu_is_another_than_on_a_new_one(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    config = path / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    monkeypatch.setattr(devices, "missing_gpu", lambda _: "")
    for capability, dtype in (((7, 5), "float16"), ((8, 0), "bfloat16")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, given=capability: given)
        assert identity_of(ModelOptions(), ResolvedModel(path, "", Task.GENERATE)) == model_identity(path, dtype)
