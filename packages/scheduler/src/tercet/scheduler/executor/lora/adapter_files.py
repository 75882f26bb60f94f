"""Reader of an adapter's files in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load

from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.executor.lora.adapter_config import CONFIG, AdapterConfig
from tercet.scheduler.model_files import (
    FileTooLargeError,
    ModelError,
    header_tensors,
    json_object,
    read_file,
    reading,
    resolve_adapter,
)
from tercet.scheduler.models.layers.lora import LayerAdapter, Target
from tercet.scheduler.models.weights.checkpoint_names import adapter_names

_WEIGHTS = "adapter_model.safetensors"
_HEADER_BYTES = 1 << 24
"""Upper bound of the size of the names in a file."""
_CONFIG_BYTES = 1 << 24
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_KINDS = (torch.float32, torch.bfloat16, torch.float16)


class AdapterError(ModelError):
    """An adapter that cannot be run; the message is one line for the client that requested it."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter, restricted to the layers that this rank holds, and to its shard of them."""

    sha256: str
    rank: int
    """The highest rank of its layers."""
    layers: Mapping[str, LayerAdapter]
    """Layers by their paths in `LoRABank.targets`."""


def read_adapter(
    adapter: LoRAAdapter,
    targets: Mapping[str, Target],
    most: int,
    dtype: torch.dtype,
    architecture: str,
    held: Collection[str] | None = None,
) -> Adapter:
    """Read an adapter of rank `most` or less, with weights in `dtype`, of the layers `held` of all. Raise AdapterError.

    Those of other layers are checked.
    """
    try:
        with reading("the adapter"):
            read = _read(adapter, targets, most, dtype, architecture)
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error)) from error
    if held is None:
        return read
    return replace(read, layers={path: layer for path, layer in read.layers.items() if path in held})


def _read(
    adapter: LoRAAdapter, targets: Mapping[str, Target], most: int, dtype: torch.dtype, architecture: str
) -> Adapter:
    path = resolve_adapter(adapter.path)
    longest = 4 * most * sum(target.rank_one_size for target in targets.values()) + _HEADER_BYTES
    config = _content(path, CONFIG, _CONFIG_BYTES)
    try:
        weights = _content(path, _WEIGHTS, longest)
    except FileTooLargeError as error:
        raise AdapterError(f"{error}: its rank is above {most}, or it is none") from error
    values = json_object(config, CONFIG)
    sha256 = hashlib.sha256(hashlib.sha256(config).digest() + hashlib.sha256(weights).digest()).hexdigest()
    if adapter.sha256 not in ("", sha256):
        raise AdapterError("its files are others than when it was loaded: load it again")
    tensors = _tensors(weights)
    pairs = _pairs(tensors, AdapterConfig.parse(values), architecture)
    layers = {name: made for name, target in targets.items() if (made := _layer(pairs, target, dtype))}
    if pairs:
        raise AdapterError(f"{_WEIGHTS}: {next(iter(pairs))[:200]} is no layer that adapters can have here")
    rank = max((layer.b.shape[0] for layer in layers.values()), default=0)
    if not 1 <= rank <= most:
        raise AdapterError(f"its rank is {rank}; 1 to {most} are possible here (--max-lora-rank)")
    return Adapter(sha256, rank, layers)


def _content(path: Path, name: str, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raise AdapterError or ModelError."""
    try:
        return read_file(path / name, most)
    except FileNotFoundError:
        raise AdapterError(f"{name} cannot be read: No such file or directory") from None


def _tensors(weights: bytes) -> dict[str, torch.Tensor]:
    """Parse a safetensors file. Raise ModelError if its header does not fit its content."""
    length = int.from_bytes(weights[:8], "little")
    if len(weights) < 8 or length > len(weights) - 8:
        raise AdapterError(f"{_WEIGHTS}: its header is longer than the file")
    header_tensors(weights[8 : 8 + length], len(weights), _WEIGHTS)
    with reading(_WEIGHTS):
        return load(weights)


_Pair = tuple[torch.Tensor, torch.Tensor]
"""Scaled weights: a [rank, inputs] and b [outputs, rank]."""


def _pairs(tensors: Mapping[str, torch.Tensor], config: AdapterConfig, architecture: str) -> dict[str, _Pair]:
    """Return the weights of each layer by its name, without layers outside the text model."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2 or tensor.dtype not in _KINDS:
            raise AdapterError(f"{_WEIGHTS}: {name[:200]} is no weight of a linear layer")
        found.setdefault(match[1], {})[match[2]] = tensor
    here = adapter_names(found, architecture)
    pairs = {}
    for name, weights in found.items():
        if name not in here or weights.keys() != {"A", "B"} or len(weights["A"]) != weights["B"].shape[1]:
            raise AdapterError(f"{_WEIGHTS}: the weights of {name[:200]} do not fit together")
        config.check_target(name)
        pairs[here[name]] = weights["A"], weights["B"].float() * config.scale(name, len(weights["A"]))
    return pairs


def _layer(pairs: dict[str, _Pair], target: Target, dtype: torch.dtype) -> LayerAdapter | None:
    """Remove a layer's weights from `pairs` and return this rank's shard of them; None without weights."""
    cuts = dict(target.parts)
    if target.whole in pairs and len(cuts) > 1:
        a, b = pairs.pop(target.whole)
        sizes = [cut.whole for cut in cuts.values()]
        if len(b) != sum(sizes):
            raise AdapterError(f"{_WEIGHTS}: {target.whole} has {len(b)} outputs, not {sum(sizes)}")
        pairs |= {name: (a, rows) for name, rows in zip(cuts, torch.split(b, sizes), strict=True)}
    own = {name: pairs.pop(name) for name in cuts if name in pairs}
    if not own:
        return None
    rank = max(len(a) for a, _ in own.values())
    pieces = [part for part, _ in target.pieces]
    made_a = torch.zeros(len(pieces), rank, target.inputs.held, dtype=dtype)
    made_b = torch.zeros(rank, sum(cut.held for cut in cuts.values()), dtype=dtype)
    first = 0
    for part, (name, cut) in enumerate(cuts.items()):
        if name in own:
            a, b = own[name]
            if (a.shape[1], len(b)) != (target.inputs.whole, cut.whole):
                raise AdapterError(
                    f"{_WEIGHTS}: {name} is of {a.shape[1]} inputs and {len(b)} outputs, "
                    f"not of {target.inputs.whole} and {cut.whole}"
                )
            made_a[[piece == part for piece in pieces], : len(a)] = target.inputs.along(1).of(a).to(dtype)
            made_b[: len(a), first : first + cut.held] = cut.along(0).of(b).T
        first += cut.held
    return LayerAdapter(made_a, made_b if target.order is None else made_b[:, target.order])
