"""Weight updates in a running worker: equality with a worker created with the new weights, including graphs."""

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tercet.scheduler.testing.quantized_checkpoints import write_checkpoint
from tools.gpu_stages.given_tokens import LEAST, Prompts, far_from, scored, verdict, wrong_of
from tools.gpu_stages.processes import gathered
from tools.gpu_stages.scale import Results, Scale
from tools.gpu_stages.worker import NOBODY

_PROMPTS = Prompts(places=[NOBODY] * 3, decoded=[range(3), [0]])


def weights(scale: Scale) -> Iterator[Results]:
    """Yield the distance of log-probabilities from a worker with only the new weights, and from the old ones."""
    for found in gathered(partial(_compare, scale), ["replaced"], min(1, scale.processes)):
        yield {**found, "wrong": wrong_of(found)}


def _compare(scale: Scale, _: str) -> Iterator[Results]:
    with tempfile.TemporaryDirectory() as directory:
        yield _replaced(Path(directory), scale)


def _replaced(directory: Path, scale: Scale) -> Results:
    old = write_checkpoint("channel", directory / "old", scale.compared.config(scale.compared_tokens), scale.grain)
    new = _other(old, directory / "new")
    before, wanted = (torch.cat(scored(path, scale, _PROMPTS)) for path in (old, new))
    after = torch.cat(scored(old, scale, _PROMPTS, other=new))
    moved = far_from(before, wanted)
    found = verdict(far_from(after, wanted), LEAST, "what sums in another order make")
    return {**found, "moved": moved, "right": found["right"] and moved > LEAST}


def _other(model: Path, directory: Path) -> Path:
    """Write the same checkpoint with other numbers, and no other files."""
    directory.mkdir()
    (stored,) = model.glob("*.safetensors")
    tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(stored).items()}
    save_file(tensors, directory / stored.name)
    shutil.copy(model / "config.json", directory)
    return directory
