"""A worker goes on with other weights: as one that was started with them, and with the old ones gone before."""

import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.models.test_hugging_face import make
from tercet.kernels.native.library import missing_library
from tercet.protocol.messages.messages import (
    ControlReply,
    PauseGenerationReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import MemoryTag, Task
from tercet.scheduler.config import ModelOptions, ScheduleOptions
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import WeightsRead
from tercet.scheduler.executor.loading import weights_number
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.executor_factory import build_torch
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.resolved_model import ResolvedModel
from tercet.scheduler.testing import Driver, request

PROMPT = [*range(3, 40)]
NATIVE = pytest.param("cpu", marks=pytest.mark.skipif(bool(missing_library()), reason=missing_library()))


def other_weights(model: Path, directory: Path, *, seed: int = 1) -> Path:
    """A checkpoint of the same shape, without a tokenizer, as a trainer would leave it."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(model / "model.safetensors")
    noisy = {
        name: tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.1
        for name, tensor in tensors.items()
    }
    save_file(noisy, directory / "model.safetensors")
    shutil.copy(model / "config.json", directory)
    return directory


@contextmanager
def serving(model: Path, *, overlap: int = 0, split: Split = Split(), **more: Any) -> Iterator[Driver]:
    options = WorkerOptions(
        model=model, device="cpu", page_size=8, slots=4, kv_cache_bytes=1 << 20, overlap=overlap > 0, **more
    )
    worker = TpModelWorker(options) if split.ranks == 1 else Ranks(options, split)
    try:
        config = CoreConfig(token_budget=23, stages=split.stages)
        yield Driver(worker.capacity, config, overlap=overlap, executor=worker)
    finally:
        worker.close()


def ask(run: Driver, rid: str, tokens: int = 8) -> list[int]:
    run.send(request(rid, PROMPT, max_new_tokens=tokens, temperature=0.0, ignore_eos=True))
    run.run()
    return run.output[rid, 0]


def alone(model: Path, **more: Any) -> list[int]:
    with serving(model, **more) as run:
        return ask(run, "alone")


def update(run: Driver, path: Path) -> None:
    run.send(UpdateWeightsFromDiskReq(id="w", path=str(path)), WeightsRead(str(path)))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "deepseek_v3_moe"])
@pytest.mark.parametrize("backend", ["torch_native", NATIVE])
def test_answers_are_those_of_the_new_weights(
    backend: str, family: str, overlap: int, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoints(family)
    new = other_weights(model, tmp_path / "new")
    with serving(model, overlap=overlap, attention_backend=backend) as run:
        before = ask(run, "before")
        update(run, new)
        after = ask(run, "after")
        update(run, model)
        again = ask(run, "again")
        run.assert_empty()
    assert before == again == alone(model, attention_backend=backend)
    assert after == alone(new, attention_backend=backend) != before


def test_models_on_transformers_modules_take_them_too(tmp_path: Path) -> None:
    model = make("Olmo2", tmp_path / "model")
    new = other_weights(model, tmp_path / "new")
    with serving(model) as run:
        before = ask(run, "before")
        assert refusal(run, new) == ""
        update(run, new)
        assert ask(run, "after") == alone(new) != before


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_they_are_rounded_as_the_old_ones_were(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    with serving(model, quantization="int8") as run:
        update(run, new)
        assert ask(run, "after") == alone(new, quantization="int8")


def test_other_weights_of_one_name_are_told_apart(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """Hosts may have different files at the path of an update: then all ranks keep the weights that they had."""
    model = checkpoints("llama")
    options = WorkerOptions(model=model)
    one, other = (
        weights_number(replace(options, weights=other_weights(model, tmp_path / name / "new", seed=seed)))
        for name, seed in (("one", 1), ("other", 2))
    )
    assert one != other
    assert min(one, other) > weights_number(options) == 1


@pytest.mark.parametrize("split", [Split(2), Split(1, 2)], ids=str)
def test_all_ranks_load_them_and_release_memory(
    split: Split, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    with serving(model, overlap=split.stages - 1, split=split) as run:
        before = ask(run, "before")
        update(run, new)
        assert (after := ask(run, "after")) == alone(new) != before
        run.send(ReleaseMemoryReq(id="", tags=[*MemoryTag]), ResumeMemoryReq(id="", tags=[*MemoryTag]))
        assert ask(run, "resumed") == after


def test_a_dummy_model_restarts_with_its_replaced_weights(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    options = ModelOptions(model=str(model), device="cpu", load_format="dummy", kv_cache_bytes=1 << 20)
    found = ResolvedModel(model, "", Task.GENERATE, new)
    worker = build_torch(options, ScheduleOptions(), found, lambda *_: None, lambda: None)
    assert ask(Driver(worker.capacity, executor=worker), "r") == alone(new)
    worker.close()


def test_paused_text_goes_on(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    with serving(model) as run:
        run.send(request("r", PROMPT, max_new_tokens=9, temperature=0.0, ignore_eos=True))
        while len(run.output.get(("r", 0), [])) < 4:
            assert run.step()
        begun = run.output["r", 0].copy()
        run.send(PauseGenerationReq(id="p"))
        update(run, new)
        run.run()
        run.core.paused_by = ""
        run.run()
        text = run.output["r", 0]
    with serving(new) as run:
        run.send(request("r", [*PROMPT, *begun], max_new_tokens=9 - len(begun), temperature=0.0, ignore_eos=True))
        run.run()
        assert text == begun + run.output["r", 0]


def test_there_is_never_memory_for_two_models(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    left: list[bool] = []
    held: list[weakref.ref[Any]] = []

    def progress(done: int, total: int) -> None:
        left.extend(each() is not None for each in held)

    worker = TpModelWorker(WorkerOptions(model=model, device="cpu", attention_backend="torch_native"), progress)
    held.append(weakref.ref(worker._runner._model))
    run = Driver(worker.capacity, executor=worker)
    update(run, new)
    run.run()
    worker.close()
    assert left
    assert not any(left)


def refusal(run: Driver, path: Path) -> str:
    worker = run.executor
    assert isinstance(worker, TpModelWorker)
    worker.weights.request(str(path))
    while not (looked := worker.weights.pop_loaded()):
        assert worker.weights.busy
    assert looked == [str(path)]
    return worker.weights.error_of(str(path))


@pytest.mark.parametrize("backend", ["torch_native", NATIVE])
def test_what_does_not_fit_is_refused_before_anything_is_lost(
    backend: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    with serving(model, attention_backend=backend) as run:
        assert refusal(run, new) == ""
        assert refusal(run, tmp_path / "none") == f"'{tmp_path / 'none'}' is no directory"
        tensors = load_file(new / "model.safetensors")
        kept = tensors.pop("model.norm.weight")
        save_file(tensors, new / "model.safetensors")
        assert "missing: model.norm.weight" in refusal(run, new)
        save_file(tensors | {"model.norm.weight": kept[:-1].clone()}, new / "model.safetensors")
        assert "of the wrong shape: model.norm.weight" in refusal(run, new)
        save_file(tensors | {"model.norm.weight": kept}, new / "model.safetensors")
        config = json.loads((new / "config.json").read_text(encoding="utf-8"))
        for name, value in {"rope_theta": 5.0, "rms_norm_eps": 0.1}.items():
            (new / "config.json").write_text(json.dumps({**config, "rope_parameters": None, name: value}))
            assert refusal(run, new).startswith(f"{new}/config.json is of another model: ")
        (new / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": ["linear"]}}))
        assert "rope_parameters: type" in refusal(run, new)
        (new / "config.json").write_text(json.dumps({**config, "dtype": "float16", "eos_token_id": 5}))
        assert refusal(run, new) == ""
        (new / "config.json").unlink()
        assert refusal(run, new) == ""
        (new / "model.safetensors").write_bytes((new / "model.safetensors").read_bytes()[:-5])
        assert "while its header describes" in refusal(run, new)
        nested = b'{"a":' * 100_000
        (new / "model.safetensors").write_bytes(len(nested).to_bytes(8, "little") + nested)
        assert "its header cannot be read" in refusal(run, new)
        assert ask(run, "r") == alone(model, attention_backend=backend)


def test_an_order_that_is_refused_is_answered(checkpoints: Callable[[str], Path]) -> None:
    with serving(checkpoints("llama")) as run:
        run.send(UpdateWeightsFromDiskReq(id="w", path="/none"), WeightsRead("/none", "it is no directory"))
        assert [each[1] for each in run.others] == [ControlReply(id="w", ok=False, message="it is no directory")]
