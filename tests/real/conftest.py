"""A real model from a GGUF file: one server for all tests, its checkpoint in safetensors, and the goldens.

It is SmolLM2-135M-Instruct, the default model. For another one: `python -m tools.real_goldens FILE --out GOLDENS`, then
`TERCET_REAL_MODEL=FILE TERCET_REAL_GOLDENS=GOLDENS pytest -n0 tests/real/test_greedy.py`.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tercet.scheduler.gguf_models import resolve_any_model
from tercet.scheduler.hub.default_model import DEFAULT_MODEL
from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.weights.tensor_files import open_tensors
from tests.real.goldens import Golden
from tests.server_process import Server

REQUIRED = "TERCET_REQUIRE_REAL_MODEL"
"""Environment variable under which a model that cannot be downloaded fails the tests; CI sets it."""
OTHER_MODEL = os.environ.get("TERCET_REAL_MODEL", "")
GOLDENS = Path(os.environ.get("TERCET_REAL_GOLDENS") or Path(__file__).parent / "smollm2.jsonl")


@pytest.fixture(scope="session")
def gguf_model() -> Path:
    """Return the directory that stands for the GGUF file, downloaded if needed."""
    try:
        return resolve_any_model(OTHER_MODEL or DEFAULT_MODEL)
    except ModelError as error:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server(gguf_model: Path) -> Iterator[Server]:
    """Yield a server with float32 activations. Without a MODEL it serves the default model."""
    named = (OTHER_MODEL,) if OTHER_MODEL else ()
    running = Server(*named, "--dtype", "float32", "--kv-cache-bytes", "512MiB").wait()
    assert OTHER_MODEL or running.model() == DEFAULT_MODEL
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="session")
def checkpoint(gguf_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the model's dequantized weights in safetensors."""
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(gguf_model, directory, ignore=shutil.ignore_patterns("*.gguf"))
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(gguf_model):
        with open_tensors(file) as opened:
            tensors |= {name: opened.get_tensor(name) for name in read_header(file)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def goldens() -> dict[str, Golden]:
    """Return the goldens by the name of their prompt."""
    lines = GOLDENS.read_text(encoding="utf-8").splitlines()
    return {record["name"]: Golden(record) for record in map(json.loads, lines)}
