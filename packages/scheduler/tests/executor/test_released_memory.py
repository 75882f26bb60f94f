"""A worker gives memory back to the system, and answers afterwards as before."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.executor.test_replaced_weights import NATIVE, alone, ask, other_weights, serving, update
from tercet.protocol.messages.messages import ControlReply, ReleaseMemoryReq, ResumeMemoryReq
from tercet.protocol.messages.values import MemoryTag
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.testing import Driver

WEIGHTS, KV_CACHE = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE
KV_BYTES = 96 << 20
REPEAT = 500


def change(run: Driver, order: ReleaseMemoryReq | ResumeMemoryReq) -> ControlReply:
    run.send(order)
    run.run()
    reply = run.others[-1][1]
    assert isinstance(reply, ControlReply)
    return reply


def release(run: Driver, tags: list[MemoryTag]) -> None:
    assert change(run, ReleaseMemoryReq(id="", tags=tags)).ok


def resume(run: Driver, tags: list[MemoryTag]) -> None:
    assert change(run, ResumeMemoryReq(id="", tags=tags)).ok


@pytest.mark.parametrize(
    ("family", "tags", "overlap"),
    [
        ("llama", [KV_CACHE], 0),
        ("llama", [WEIGHTS], 1),
        ("deepseek_v3_moe", [WEIGHTS, KV_CACHE], 0),
        ("qwen3_next", [WEIGHTS, KV_CACHE], 1),
    ],
)
def test_answers_are_the_same_after_a_resume(
    family: str, tags: list[MemoryTag], overlap: int, checkpoints: Callable[[str], Path]
) -> None:
    with serving(checkpoints(family), overlap=overlap) as run:
        before = ask(run, "before")
        release(run, tags)
        resume(run, tags)
        assert ask(run, "after") == before
        run.assert_empty()


@pytest.mark.parametrize("backend", ["torch_native", NATIVE])
def test_weights_that_replaced_released_ones_are_served(
    backend: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    with serving(model, attention_backend=backend) as run:
        before = ask(run, "before")
        release(run, [WEIGHTS, KV_CACHE])
        update(run, new)
        run.run()
        resume(run, [KV_CACHE])
        assert ask(run, "after") == alone(new, attention_backend=backend) != before


def test_weights_whose_files_are_gone_stay_released(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    new = other_weights(checkpoints("llama"), tmp_path / "new")
    file = new / "model.safetensors"
    with serving(checkpoints("llama")) as run:
        update(run, new)
        before = ask(run, "before")
        release(run, [WEIGHTS])
        file.rename(tmp_path / "aside")
        reply = change(run, ResumeMemoryReq(id="", tags=[WEIGHTS]))
        assert not reply.ok
        assert "safetensors" in reply.message
        (tmp_path / "aside").rename(file)
        resume(run, [WEIGHTS])
        assert ask(run, "after") == before


@contextmanager
def large_worker(checkpoints: Callable[[str], Path], directory: Path) -> Iterator[Driver]:
    """A worker with 70 MiB of weights, and a KV cache of which every page was written.

    The embedding of the small checkpoint is repeated, for a vocabulary of `REPEAT` times as many tokens.
    """
    shutil.copytree(checkpoints("llama"), directory)
    tensors = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].repeat(REPEAT, 1).contiguous()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["vocab_size"] *= REPEAT
    (directory / "config.json").write_text(json.dumps(config))
    options = WorkerOptions(model=directory, device="cpu", dtype="float32", slots=500, kv_cache_bytes=KV_BYTES)
    worker = TpModelWorker(options)
    assert worker._pool.bytes > 0.95 * KV_BYTES
    for tensor in worker._pool.tensors:
        tensor.fill_(1)
    try:
        yield Driver(worker.capacity, executor=worker)
    finally:
        worker.close()


def resident() -> int:
    """Bytes, of the process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def test_memory_returns_to_the_system(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    with large_worker(checkpoints, tmp_path / "large") as run:
        assert isinstance(run.executor, TpModelWorker)
        pool, before = run.executor._pool, ask(run, "before")
        weights = (tmp_path / "large" / "model.safetensors").stat().st_size
        assert weights > 40 << 20
        levels = [resident()]
        for tags in ([KV_CACHE], [WEIGHTS]):
            release(run, tags)
            levels.append(resident())
        assert levels[0] - levels[1] > 0.9 * pool.bytes, levels
        assert levels[1] - levels[2] > 0.9 * weights, levels
        resume(run, [WEIGHTS, KV_CACHE])
        assert ask(run, "after") == before
