"""Towers, which make embeddings of images or sounds: modules of transformers, with the weights of a checkpoint."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.weights.tensor_files import open_tensors

TowerT = TypeVar("TowerT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TowerModel(Generic[TowerT]):
    """The tower of a model's images or sounds, and the names of its tensors."""

    noun: ClassVar[str] = "tower"
    """Name of the tower in errors."""
    build: Callable[[], TowerT]
    """Makes the tower on the CPU, without loaded weights."""
    names: Mapping[str, str]
    """Beginnings of the names of stored tensors, without transformers 5's `model.`, and of the tower's parameters. The
    first that fits counts."""

    def name_here(self, stored: str) -> str | None:
        """Return the name of a stored tensor in the tower; None for those of the text model."""
        name = stored.removeprefix("model.")
        for beginning, here in self.names.items():
            if name.startswith(beginning):
                return here + name.removeprefix(beginning)
        return None


def load_tower(model: TowerModel[TowerT], directory: Path, dtype: torch.dtype, device: torch.device) -> TowerT:
    """Return the tower with the weights of a checkpoint. Raise ModelError for one that lacks any."""
    with _parameters_on_meta():
        tower = model.build().eval()
    missing = {name for name, _ in tower.named_parameters()}
    buffers = {name: tensor for name, tensor in tower.state_dict().items() if name not in missing}
    for path in weight_files(directory):
        header = read_header(path)
        with open_tensors(path) as file:
            for stored in header:
                if (here := model.name_here(stored)) is None:
                    continue
                place = buffers[here] if here in buffers else tower.get_parameter(here) if here in missing else None
                if place is None or not _fits(header[stored].shape, place.shape):
                    raise ModelError(f"{directory}: the tensor {stored!r} does not fit the {model.noun} of config.json")
                if here in buffers:
                    place.copy_(file.get_tensor(stored).to(dtype))
                    continue
                missing.remove(here)
                _set(tower, here, file.get_tensor(stored), dtype)
    if missing:
        raise ModelError(f"{directory} lacks tensors of the {model.noun}: {', '.join(sorted(missing)[:8])}")
    return tower.to(device)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules have parameters without memory. Buffers are computed, because checkpoints do not store them all."""
    # torch takes the parameter that the hook returns, which its annotations do not say
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


def _fits(stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a stored tensor is a parameter: also a convolution whose patches a linear layer gets flat."""
    flat = len(stored) > 2 and [stored[0], math.prod(stored[1:])] == [*shape]
    return flat or tuple(stored) == tuple(shape)


def _set(tower: nn.Module, name: str, stored: torch.Tensor, dtype: torch.dtype) -> None:
    path, _, last = name.rpartition(".")
    weight = torch.empty(tower.get_parameter(name).shape, dtype=dtype)
    weight.view(stored.shape).copy_(stored)
    setattr(tower.get_submodule(path), last, nn.Parameter(weight, requires_grad=False))
