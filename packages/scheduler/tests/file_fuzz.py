"""A program that reads damaged models and adapters, in a process of bounded memory: see `test_file_fuzz.py`.

`python -m packages.scheduler.tests.file_fuzz KIND DIRECTORY SAMPLE FIRST COUNT SECONDS`: for the seeds from FIRST on,
each reader either reads a damaged copy of SAMPLE or raises an error of its own of one line. The program ends with 1 at
the first that does otherwise, names its seed, and leaves the files where they are.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from transformers import AutoConfig

from tercet.protocol.damage import damaged, damaged_json, damaged_safetensors, run_cases
from tercet.protocol.messages.values import LoRAAdapter, Task
from tercet.scheduler.config import ModelOptions
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.executor.lora.adapter_files import AdapterError
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.resolved_model import identity_of, resolve_served_model
from tercet.scheduler.testing import Driver, request
from tercet.scheduler.testing.lora_checkpoints import write_adapter

_NO_MODEL = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json")
"""Files of a model that a scheduler passes on."""


def damage(directory: Path, random: Random) -> str:
    """Damage one file of a directory, and return its name."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in _NO_MODEL)
    names = sorted(str(path.relative_to(directory)) for path in files)
    name = random.choice([*names, *["config.json"] * (("config.json" in names) * 3 * len(names))])
    path = directory / name
    how = damaged_safetensors if name.endswith(".safetensors") else damaged_json if name.endswith("json") else damaged
    path.write_bytes(how(path.read_bytes(), random))
    return name


def options(directory: Path) -> WorkerOptions:
    """What a worker of a tiny model is made with."""
    return WorkerOptions(
        model=directory, device="cpu", page_size=8, slots=4, kv_cache_bytes=1 << 20, max_lora_rank=8, threads=1
    )


def start(directory: Path, random: Random) -> str:
    """Read a damaged model as a scheduler does that starts with it, and ends with 2 and a line for a ValueError."""
    damage(directory, random)
    named = ModelOptions(model=str(directory), device="cpu")
    try:
        found = resolve_served_model(named)
        identity_of(named, found)
        if found.task is Task.GENERATE:
            TpModelWorker(options(directory)).close()
        else:
            EncoderWorker(EncoderOptions(model=directory, task=found.task, device="cpu", threads=1))
    except ValueError as error:
        return str(error)
    return ""


class Running:
    """A worker that serves while it is given damaged weights and adapters."""

    def __init__(self, sample: Path, scratch: Path, *, adapters: bool) -> None:
        self._sample = sample
        self._adapter = write_adapter(scratch / "adapter", sample)
        self._worker = TpModelWorker(dataclasses.replace(options(sample), max_loras=int(adapters)))
        self._run = Driver(self._worker.capacity, CoreConfig(token_budget=23), executor=self._worker)
        self._asked = 0
        self._first = self._ask()

    def weights(self, directory: Path, random: Random) -> str:
        """Give damaged weights: looked at and, whatever comes of that, loaded."""
        damage(directory, random)
        desk = self._worker.weights
        desk.request(str(directory))
        while not desk.pop_loaded():
            time.sleep(0.001)
        fault = desk.error_of(str(directory))
        told = self._load(directory) if not fault or random.random() < 0.2 else fault
        if not told:
            assert self._load(self._sample) == ""
        assert self._ask() == self._first
        return told

    def _load(self, weights: Path) -> str:
        return self._worker.submit(Plan(step=0, weights=str(weights), rows=[])).result().fault

    def adapter(self, directory: Path, random: Random) -> str:
        """Give a damaged adapter."""
        shutil.rmtree(directory)
        shutil.copytree(self._adapter, directory)
        damage(directory, random)
        desk, adapter = self._worker.adapters, LoRAAdapter(str(directory))
        assert desk is not None
        desk.request(adapter)
        while not desk.pop_loaded():
            time.sleep(0.001)
        error = desk.get(adapter).exception()
        assert error is None or isinstance(error, AdapterError), error
        assert bool(error) == (desk.value_of(adapter) is None)
        told = desk.error_of(adapter)
        desk.retain(())
        return told

    def _ask(self) -> list[int]:
        self._asked += 1
        rid = str(self._asked)
        self._run.send(request(rid, [*range(3, 20)], max_new_tokens=2, temperature=0.0, ignore_eos=True))
        self._run.run()
        return self._run.output[rid, 0]


def main(kind: str, scratch: Path, sample: Path, first: int, count: int, seconds: float) -> int:
    """Try seeds on copies of a model. Return the exit status."""
    torch.set_num_threads(1)
    AutoConfig.from_pretrained(sample, local_files_only=True)  # imports what takes long, once and in unbounded memory
    running = None if kind == "start" else Running(sample, scratch, adapters=kind == "adapter")
    read: Callable[[Path, Random], str] = start if running is None else getattr(running, kind)

    def case(random: Random) -> str:
        directory = scratch / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(sample, directory)
        return read(directory, random)

    return run_cases(case, first=first, count=count, seconds=seconds)


if __name__ == "__main__":
    _, kind, scratch, sample, *numbers = sys.argv
    sys.exit(main(kind, Path(scratch), Path(sample), int(numbers[0]), int(numbers[1]), float(numbers[2])))
