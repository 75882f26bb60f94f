"""What a model's or an adapter's files may hold ends no scheduler: one line and status 2 at the start, or a fault."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.executor.test_replaced_weights import alone, ask, other_weights, refusal, serving, update
from packages.scheduler.tests.models.test_hugging_face import make
from tercet.protocol.messages.messages import ControlReply
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.__main__ import EXIT_CONFIG, main
from tercet.scheduler.async_loader import AsyncLoader, ReadingThreads, ReadTimeoutError
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.executor.lora.adapter_files import Adapter
from tercet.scheduler.executor.lora.adapters import adapter_loader
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.weights_loader import weights_loader
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import FileTooLargeError, ModelError, read_file, read_header, reading
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.testing import Driver
from tercet.scheduler.testing.lora_checkpoints import write_adapter

Checkpoints = Callable[[str], Path]
LARGE = "9" * 401


def with_config(directory: Path, **fields: Any) -> Path:
    """Change a config; a value that begins with "=" is written as it stands."""
    path = directory / "config.json"
    text = json.dumps({**json.loads(path.read_text()), **fields})
    for value in fields.values():
        if isinstance(value, str) and value.startswith("="):
            text = text.replace(json.dumps(value), value[1:])
    path.write_text(text)
    return directory


def with_metadata(directory: Path, metadata: Any) -> Path:
    """Change the metadata of a safetensors file."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps({**json.loads(content[8 : 8 + length]), "__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return directory


def with_generation(directory: Path, text: str) -> Path:
    (directory / "generation_config.json").write_text(text)
    return directory


def with_pipe(directory: Path, name: str) -> Path:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    return directory


YARN = {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 64}
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "401 digits": (lambda path: with_config(path, rms_norm_eps=f"={LARGE}"), "rms_norm_eps is not a finite number"),
    "1e308": (lambda path: with_config(path, rope_parameters=YARN), "factor: 1e+308 is not a positive number from"),
    "a long factor": (lambda path: with_config(path, rope_parameters={**YARN, "factor": 1e12}), "times the length of"),
    "metadata": (lambda path: with_metadata(path, {"format": 5}), "__metadata__ must map names to texts"),
    "NaN": (lambda path: with_generation(path, '{"temperature": NaN}'), "temperature is not a finite number"),
    "deep": (lambda path: with_config(path, more=f"={'[' * 200}{']' * 200}"), "are inside one another"),
    "a subclass": (lambda path: with_config(path, quantization_config=["x"]), "quantization_config"),
}


def copied(model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    return target


@pytest.mark.parametrize("spoilt", [*SPOILT, "pipe"])
def test_a_start_ends_with_one_line(
    spoilt: str, checkpoints: Checkpoints, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, why = {**SPOILT, "pipe": (lambda path: with_pipe(path, "tokenizer.json"), "is not a regular file")}[spoilt]
    model = copied(checkpoints("llama"), tmp_path / "model")
    spoil(model)
    check_start(model, why, tmp_path, capfd)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"layer_types": 7}, "config.json: transformers cannot read it"),
        ({"rope_parameters": 7}, "config.json"),
        ({"hidden_size": "x"}, "hidden_size"),
    ],
)
def test_so_does_one_of_a_model_on_transformers_modules(
    fields: dict[str, Any], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = with_config(make("Olmo2", tmp_path / "model"), **fields)
    (model / "tokenizer.json").write_text("{}")
    check_start(model, why, tmp_path, capfd)


def check_start(model: Path, why: str, directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(model), "--device", "cpu", "--listen", f"ipc://{directory}"])
    assert ended.value.code == EXIT_CONFIG
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tercet-scheduler: ")]
    assert len(lines) == 1
    assert why in lines[0]


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_worker_that_serves_refuses_them_as_weights(spoilt: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    spoil, why = SPOILT[spoilt]
    spoil(new)
    with serving(model) as run:
        assert why in refusal(run, new)
        assert ask(run, "r") == alone(model)


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), OverflowError("too\nlarge"), OSError("gone")])
def test_whatever_looking_at_weights_raises_is_a_fault_of_one_line(error: Exception) -> None:
    def check(path: str) -> None:
        raise error

    desk = weights_loader(check)
    desk.request("/new")
    end = time.monotonic() + 10
    while not desk.pop_loaded():
        assert time.monotonic() < end
    fault = desk.error_of("/new")
    assert fault
    assert "\n" not in fault


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_fail_after_all_give_way_to_those_from_before(
    size: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """As where the files change between the look and the load. All ranks load those from before."""
    model = checkpoints("llama")
    first, bad, good = (other_weights(model, tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b", "c")))
    tensors = load_file(bad / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, bad / "model.safetensors")
    with serving(model, split=Split(size)) as run:
        update(run, first)
        before = ask(run, "before")
        update(run, bad)
        assert ask(run, "between") == before == alone(first)
        update(run, good)
        assert ask(run, "after") == alone(good)
        replies = [each[1] for each in run.others if isinstance(each[1], ControlReply)]
    assert [reply.ok for reply in replies] == [True, False, True]
    assert "missing: model.norm.weight" in replies[1].message


def test_a_rank_that_alone_fails_is_followed_by_all(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = checkpoints("llama")
    new = other_weights(model, tmp_path / "new")
    options = WorkerOptions(model=model, device="cpu", page_size=8, slots=4, kv_cache_bytes=1 << 20)
    worker = Ranks(options, Split(2))
    try:
        own = worker._worker

        def fail(*_: object) -> None:
            vars(own).pop("_load")
            raise OSError("here alone")

        own._load = fail  # type: ignore[method-assign, assignment]
        result = worker.submit(Plan(step=0, weights=str(new), rows=[])).result()
        assert result.fault == "here alone"
        run = Driver(worker.capacity, executor=worker)
        assert ask(run, "r") == alone(model)
    finally:
        worker.close()


def test_a_huge_context_takes_no_more_memory_than_there_is(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = with_config(copied(checkpoints("llama"), tmp_path / "model"), max_position_embeddings=2**31 - 1)
    worker = TpModelWorker(WorkerOptions(model=model, device="cpu", page_size=8, slots=4, kv_cache_bytes=1 << 20))
    assert 10_000 < worker.capacity.context_length < 2**28
    tables = worker.capacity.context_length * 8 * 4  # of 8 elements a head in float32
    assert tables < 2**33
    assert ask(Driver(worker.capacity, executor=worker), "r") == alone(checkpoints("llama"))
    worker.close()


def test_a_shorter_longrope_rotates_as_the_longer_one_does(checkpoints: Checkpoints) -> None:
    from tercet.scheduler.models.config.model_config import with_context_length
    from tercet.scheduler.models.registry import build_model, load_config

    config = load_config(checkpoints("phi3_longrope"))
    assert config.context_length == 512
    long, short = (build_model(each) for each in (config, with_context_length(config, 24)))  # type: ignore[arg-type]
    tables = [
        next(tensor for name, tensor in model.named_buffers() if name.endswith("cache")) for model in (long, short)
    ]
    assert len(tables[1]) == 24
    assert torch.equal(tables[0][:24], tables[1])


def test_adapters_are_regular_files_of_bounded_size(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    with serving(base, max_loras=1, max_lora_rank=8) as run:
        desk = run.executor.adapters
        assert isinstance(desk, AsyncLoader)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            piped = with_pipe(write_adapter(tmp_path / f"pipe {name}", base), name)
            assert "is not a regular file" in fault_of(desk, piped)
        large = write_adapter(tmp_path / "large", base)
        os.truncate(large / "adapter_config.json", 3 << 30)
        assert "adapter_config.json is larger than" in fault_of(desk, large)
        device = write_adapter(tmp_path / "device", base)
        (device / "adapter_config.json").unlink()
        (device / "adapter_config.json").symlink_to("/dev/zero")
        assert "is not a regular file" in fault_of(desk, device)
        assert fault_of(desk, write_adapter(tmp_path / "good", base)) == ""


def fault_of(desk: AsyncLoader[LoRAAdapter, object], path: Path) -> str:
    adapter = LoRAAdapter(str(path))
    desk.request(adapter)
    end = time.monotonic() + 10
    while not desk.pop_loaded():
        assert time.monotonic() < end
    return desk.error_of(adapter)


@contextmanager
def stuck() -> Iterator[Callable[..., Any]]:
    """A call that does not come back before the block ends, as of a file system that does not answer."""
    released = threading.Event()
    try:
        yield lambda *_: released.wait(60)
    finally:
        released.set()


def test_threads_that_are_lost_are_replaced_and_not_waited_for() -> None:
    with stuck() as call:
        threads = ReadingThreads(1, "read", patience=0.05)
        lost: list[Future[Any]] = [threads.submit(call) for _ in range(3)]
        assert threads.submit(lambda: "read").result(10) == "read"
        for each in lost:
            with pytest.raises(ReadTimeoutError, match=r"not read within 0\.05 s"):
                each.result(10)
        begun = time.monotonic()
        threads.submit(call)
        waits: Future[Any] = threads.submit(call)
        threads.shutdown()
        assert time.monotonic() - begun < 5
        assert waits.cancelled()


def test_an_adapter_that_hangs_keeps_no_other_from_being_read() -> None:
    with stuck() as call:

        def read(adapter: LoRAAdapter) -> Adapter:
            if adapter.path == "/hangs":
                call()
            return Adapter("1" * 64, 4, {})

        desk = adapter_loader(read, spare=2, timeout=0.05)
        over = sum(desk.request(LoRAAdapter("/hangs", str(number) * 64)) for number in range(8))
        assert not desk.request(LoRAAdapter("/good"))
        read_by_now: list[LoRAAdapter] = []
        end = time.monotonic() + 10
        while desk.busy:
            assert time.monotonic() < end
            read_by_now += desk.pop_loaded()
        assert over + len(read_by_now) == 9
        assert desk.get(LoRAAdapter("/good")).result().sha256 == "1" * 64
        assert "not read within" in desk.error_of(LoRAAdapter("/hangs", "0" * 64))
        desk.close()


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(FileTooLargeError, match="file is larger than 4 bytes"):
        read_file(tmp_path / "file", 4)
    with pytest.raises(ModelError, match="is not a regular file"):
        read_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": {"1": 1}, "data_offsets": [0, 4]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1] * 40, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
        {"a": [1]},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"x": None}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": [1]},
    ],
)
def test_headers_that_the_library_refuses_are_refused(header: Any, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ModelError, match=r"x\.safetensors: its header cannot be read: "):
        read_header(tmp_path / "x.safetensors")


def test_reading_passes_errors_that_say_for_whom_they_are() -> None:
    for error in (ModelError("own"), MemoryError()):
        with pytest.raises(type(error)), reading("it"):
            raise error
    for foreign, message in (
        (KeyError("x"), "it cannot be read: KeyError: 'x'"),
        (ValueError("y"), "it cannot be read: y"),
    ):
        with pytest.raises(ModelError) as caught, reading("it"):
            raise foreign
        assert str(caught.value) == message
    with pytest.raises(ModelError, match="PanicException"), reading("it"):
        raise type("PanicException", (BaseException,), {})("a panic in Rust")
