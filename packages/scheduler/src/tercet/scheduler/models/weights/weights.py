"""The weight loader: safetensors or GGUF files, memory-mapped, copied directly into the fused parameters."""

import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tercet.kernels.ops.moe import QuantizedExperts
from tercet.kernels.ops.quantized import QuantizedWeight, concat_rows
from tercet.scheduler.model_files import ModelError, StoredTensor, read_header, weight_files
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.quantized_config import StoredQuantization
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.encoder_layers import LayerNorm
from tercet.scheduler.models.layers.latent_attention import HeadProjections
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.linear import FusedLinear, Linear, MappedRows, Matrix
from tercet.scheduler.models.layers.moe import ExpertLinear, Experts
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.recurrent import CausalConv
from tercet.scheduler.models.layers.shard import Cut
from tercet.scheduler.models.weights.checkpoint_names import (
    ExpertNames,
    FusedNames,
    Place,
    convolution_parts,
    text_names,
    without_experts,
)
from tercet.scheduler.models.weights.kv_scales import SUFFIXES as KV_SCALES
from tercet.scheduler.models.weights.mxfp4_experts import Mxfp4Experts
from tercet.scheduler.models.weights.quantized_checkpoints import (
    QuantizedLinear,
    quantized_as,
    quantized_linears,
)
from tercet.scheduler.models.weights.tensor_files import GGUFTensors, open_tensors

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""A callback with (bytes done, bytes in all)."""

_Quantized = QuantizedLinear | Mxfp4Experts
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LOGITS_BIAS = "final_logits_bias"
"""Tensor that a checkpoint may leave out: it is then 0."""
_ELSEWHERE = (".rotary_emb.inv_freq", *KV_SCALES)
"""Suffixes of tensors that old versions of transformers saved and that are computed here, and of KV scales."""
_OF_CACHES = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
"""Prefixes of tensors that layers in `shared_caches` may have and that are not read."""
_DUMMY_BLOCK = 1_048_573  # a prime, so that repeats of the block fall differently on every row


class LoadProgress:
    """The bytes of a checkpoint that have been read, and the callback that reports them."""

    def __init__(self, progress: Progress | None, files: Mapping[Path, Mapping[str, StoredTensor]]) -> None:
        self._progress = progress
        self._total = sum(_size(tensor) for header in files.values() for tensor in header.values())
        self._done = 0

    def add(self, tensor: StoredTensor) -> None:
        """Count a tensor as read."""
        self._done += _size(tensor)
        if self._progress is not None:
            self._progress(self._done, self._total)


class _Fitting(NamedTuple):
    """A checkpoint that fits a model."""

    files: Mapping[Path, Mapping[str, StoredTensor]]
    stored: Mapping[str, StoredTensor]
    targets: Mapping[str, Place]
    linears: Sequence[_Quantized]
    quantized: Mapping[str, tuple[int, ...]]
    """The shapes of the stored tensors of quantized layers."""


def check_weights(model: CausalLM, directory: Path) -> None:
    """Raise ModelError for a checkpoint that `load_weights` would refuse. The model is not changed."""
    _fitting(model, directory)


def load_weights(
    model: CausalLM,
    directory: Path,
    progress: Progress | None = None,
    *,
    dequantized: bool = False,
    keep_mapped: bool = False,
) -> None:
    """Fill a model from a checkpoint, casting to the model's dtype.

    Everything is checked before the first byte is copied: raise ModelError that lists each missing, unexpected or
    misshapen tensor. Quantized layers stay quantized unless `dequantized`. With `keep_mapped`, matrices stay in the
    mapped files until the caller takes the weights away.
    """
    fitting = _fitting(model, directory)
    files = fitting.files
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    tally = LoadProgress(progress, files)
    mapped_targets = _mapped_targets(model, fitting.stored) if keep_mapped else {}
    fill(files, fitting.targets, tally, mapped_targets=mapped_targets, later=fitting.quantized)
    ExpertNames.of(fitting.stored).deinterleave(model)
    _load_quantized(fitting.linears, files, device, tally, model.config.dtype if dequantized else None)
    finish(model)


def _fitting(model: CausalLM, directory: Path) -> _Fitting:
    files = _read_text_part(directory, model.config, _other_stages(model))
    stored = {name: tensor for header in files.values() for name, tensor in header.items()}
    if absent := ExpertNames.of(stored).of_other_ranks(model):
        files = {path: without_experts(header, absent) for path, header in files.items()}
        stored = {name: tensor for header in files.values() for name, tensor in header.items()}
    quantization = model.config.quantization
    linears = quantized_linears(model, quantization, stored) if quantization is not None else []
    quantized = {name: shape for linear in linears for name, shape in linear.shapes(stored).items()}
    in_few_bits = {f"{prefix}.weight" for linear in linears for prefix in linear.parts}
    absent = in_few_bits if _LOGITS_BIAS in stored else {*in_few_bits, _LOGITS_BIAS}
    targets = {name: place for name, place in checkpoint_tensors(model, stored).items() if name not in absent}
    shapes = {name: place.stored_shape for name, place in targets.items()}
    unread = {name for linear in linears for name in linear.extras()} | _zero_biases(linears, files)
    _check_orders(linears, files)
    tied_head = {_HEAD} if model.lm_head is None else set()
    check_fit(directory, shapes | quantized, files, unread | tied_head)
    if tied_head:
        _check_tied_head(directory, files, model.config.dtype)
    return _Fitting(files, stored, targets, linears, quantized)


def _other_stages(model: CausalLM) -> tuple[str, ...]:
    """Return prefixes of the tensors that other pipeline stages have."""
    stage, count = model.shard.stage, model.config.layers
    absent = [f"model.layers.{layer}." for layer in range(count) if layer not in stage.layers(count)]
    tied = model.config.tie_word_embeddings and stage.is_last
    absent += [] if stage.is_first or tied else ["model.embed_tokens."]
    return (*absent, *(() if stage.is_last else ("model.norm.", _HEAD)))


def _read_text_part(directory: Path, config: ModelConfig, absent: Sequence[str]) -> dict[Path, dict[str, StoredTensor]]:
    """Return each file's tensors by their names here, without those of images and multi-token prediction.

    Names with the prefixes in `absent` are left out, too.
    """
    ahead = (
        *absent,
        *("mtp.", "model.mtp."),
        *(f"model.layers.{config.layers + number}." for number in range(config.mtp_layers)),
        *(f"model.layers.{layer}.self_attn.{name}" for layer in config.shared_caches for name in _OF_CACHES),
    )
    files = {path: read_header(path) for path in weight_files(directory)}
    names = text_names([name for header in files.values() for name in header])
    if left := sum(map(len, files.values())) - len(names):
        logger.info("%s: the text model has no place for %d tensors of encoders", directory, left)
    names = {name: here for name, here in names.items() if not here.startswith(ahead)}
    return {
        path: {names[name]: tensor for name, tensor in header.items() if name in names}
        for path, header in files.items()
    }


def fill(
    files: Mapping[Path, Mapping[str, StoredTensor]],
    targets: Mapping[str, Place],
    tally: LoadProgress,
    *,
    mapped_targets: Mapping[str, Callable[[MappedRows], None]] = {},
    later: Container[str] = (),
) -> None:
    """Copy each stored tensor, or the part of it that is held here, to its target. All keys are names in the files.

    A tensor with a borrower is lent to it instead of copied, and counts as read once the borrower takes it. Tensors
    without a target count as read; those in `later` are skipped, and their reader counts them.
    """
    for path, header in files.items():
        with open_tensors(path) as file:  # tensors are views of the mapped file
            for name, tensor in header.items():
                if name in later:
                    continue
                read = partial(tally.add, tensor)
                lend = mapped_targets.get(name) if name in targets else None
                rows = None if lend is None else lent_rows(file, tensor, targets[name])
                if lend is not None and rows is not None:
                    lend(MappedRows(rows, read))
                    continue
                if name in targets:
                    place = targets[name]
                    place.memory.copy_(place.held(file.get_tensor(tensor.name)))
                read()


def lent_rows(file: Any, tensor: StoredTensor, place: Place) -> torch.Tensor | QuantizedWeight | None:
    """Return the rows of a matrix that a module may keep in their place; None for those that would be copies.

    Of a GGUF file, these are matrices in few bits that one process holds whole, in their packed form.
    """
    if not isinstance(file, GGUFTensors):
        return place.held(file.get_tensor(tensor.name))
    whole = place.memory.dim() == 2 and place.stored_shape == tuple(place.memory.shape)
    return file.get_blocks(tensor.name) if whole else None


def finish(model: nn.Module) -> None:
    """Call each module's `process_weights_after_loading`."""
    for module in model.modules():
        if isinstance(module, OpsModule):
            module.process_weights_after_loading()


def _mapped_targets(model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, Callable[[MappedRows], None]]:
    """Map each stored name of a matrix's rows, or of an expert's, to the call that lends the tensor to its module."""
    found: dict[str, Callable[[MappedRows], None]] = {}
    names, experts = FusedNames.of(stored), ExpertNames.of(stored)
    for path, module in experts.modules(model):
        if isinstance(module, FusedLinear):
            parts = names.parts(path, module)
            runs = [None] if len(parts) == 1 else range(len(parts))
            found |= {f"{part}.weight": partial(module.set_mapped, run) for run, part in zip(runs, parts, strict=True)}
        elif isinstance(module, Matrix):
            found[f"{path}.weight"] = partial(module.set_mapped, 0)
        elif isinstance(module, Experts):
            found |= experts.mapped_targets(path, module)
    return found


def _zero_biases(linears: Sequence[_Quantized], files: Mapping[Path, Mapping[str, StoredTensor]]) -> set[str]:
    """Return stored zero biases of layers without biases. AutoGPTQ used to give each layer one."""
    asked = {name for linear in linears for name in linear.missing_biases()}
    found = set()
    for path, header in files.items():
        if names := asked & header.keys():
            with open_tensors(path) as file:
                found |= {name for name in names if not file.get_tensor(header[name].name).any()}
    return found


def _check_orders(linears: Sequence[_Quantized], files: Mapping[Path, Mapping[str, StoredTensor]]) -> None:
    """Raise ModelError for a layer whose stored inputs are not in the order of their groups."""
    ordered = {name: linear for linear in linears if isinstance(linear, QuantizedLinear) for name in linear.orders()}
    for path, header in files.items():
        if names := ordered.keys() & header.keys():
            with open_tensors(path) as file:
                for name in names:
                    ordered[name].check_order(name, file.get_tensor(header[name].name))


def _load_quantized(
    linears: Sequence[_Quantized],
    files: Mapping[Path, Mapping[str, StoredTensor]],
    device: torch.device,
    tally: LoadProgress,
    dtype: torch.dtype | None,
) -> None:
    """Read the quantized layers onto a device; with a `dtype`, in full."""
    if not linears:
        return
    place = {name: path for path, header in files.items() for name in header}
    with ExitStack() as stack:
        opened = {path: stack.enter_context(open_tensors(path)) for path in files}

        def read(name: str, cut: Cut | None = None) -> torch.Tensor:
            path = place[name]
            tensor: torch.Tensor = opened[path].get_tensor(files[path][name].name)
            held = tensor if cut is None else cut.of(tensor)
            tally.add(files[path][name])
            return held.to(device)

        for linear in linears:
            linear.load(read, device, dtype)


def dummy_weights(model: nn.Module, seed: int = 0, *, quantization: StoredQuantization | None = None) -> None:
    """Fill a model of any size with cheap random weights: one block of normal(0, 0.02), repeated. Norms are 1.

    With a `quantization`, layers that such a checkpoint would have quantized, and that have kernels, are quantized;
    other layers are in full.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    block = torch.randn(_DUMMY_BLOCK, generator=generator) * 0.02
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear) and module.weight.is_meta:
            never = Linear if quantization is not None and quantization.method == "mxfp4" else HeadProjections
            if quantization is None or isinstance(module, never):
                module.weight = nn.Parameter(torch.empty_like(module.weight, device=device), requires_grad=False)
            else:
                _dummy_quantized(module, block.to(device), quantization)
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if kind == "weight" and isinstance(module, RMSNorm | LayerNorm):
                parameter.fill_(1.0)
            elif not parameter.is_meta:
                _tile(parameter.view(-1), block.to(parameter.device, parameter.dtype))


def _dummy_quantized(linear: Linear | ExpertLinear, block: torch.Tensor, quantization: StoredQuantization) -> None:
    """Fill a layer with repeats of the block, quantized on the device, one expert at a time to save memory."""
    *_, outputs, inputs = linear.weight.shape
    full = torch.empty(outputs, inputs, device=block.device)
    _tile(full.view(-1), block)
    weight = quantized_as(full, quantization, tall=isinstance(linear, Linear))
    if isinstance(linear, Linear):
        linear.quantized = weight
    else:
        experts = len(linear.weight)
        linear.quantized = QuantizedExperts(concat_rows([weight] * experts), experts)


def checkpoint_tensors(model: nn.Module, stored: Mapping[str, StoredTensor] = {}) -> dict[str, Place]:
    """Map each name that a checkpoint must have to its destination: a parameter, or rows of a fused one.

    If a tensor has several possible names, the checkpoint's `stored` tensors decide.
    """
    tensors: dict[str, Place] = {}
    names, fused = ExpertNames.of(stored), FusedNames.of(stored)
    for path, module in names.modules(model):
        if isinstance(module, Experts):
            tensors |= names.tensors(path, module)
        if isinstance(module, Experts | ExpertLinear):
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:  # a quantized weight, which another function reads
                continue
            if isinstance(module, FusedLinear):
                parts = fused.parts(path, module)
                rows = torch.split(parameter, [cut.held for cut in parts.values()])
                tensors |= {
                    f"{part}.{kind}": Place(row, cut) for (part, cut), row in zip(parts.items(), rows, strict=True)
                }
            elif isinstance(module, CausalConv):
                channels = convolution_parts(path, module, stored)
                rows = torch.split(parameter, [cut.held for cut in channels.values()])
                tensors |= {
                    f"{part}.{kind}": Place(row, cut) for (part, cut), row in zip(channels.items(), rows, strict=True)
                }
            else:
                cut = module.cuts.get(kind) if isinstance(module, OpsModule) else None
                tensors[names.parameter(path, kind)] = Place(parameter, cut)
    return tensors


def check_fit(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[Path, Mapping[str, StoredTensor]],
    unread: Set[str] = frozenset(),
) -> None:
    """Raise ModelError for any mismatch: each of the `shapes` must be stored, and `unread` names may be."""
    names = [name for header in files.values() for name in header if not name.endswith(_ELSEWHERE)]
    stored = {name: tensor for header in files.values() for name, tensor in header.items()}
    problems = {
        "missing": shapes.keys() - stored.keys(),
        "unexpected": set(names) - shapes.keys() - unread,
        "stored twice": {name for name, times in Counter(names).items() if times > 1},
        "of the wrong shape": {
            f"{name} {list(stored[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in stored and stored[name].shape != shape
        },
    }
    if found := "; ".join(f"{what}: {', '.join(sorted(which))}" for what, which in problems.items() if which):
        raise ModelError(f"{directory} does not fit its config.json: {found}")


def _check_tied_head(directory: Path, files: Mapping[Path, Mapping[str, StoredTensor]], dtype: torch.dtype) -> None:
    """Raise ModelError for a stored head that differs from the embedding that replaces it."""
    place = {name: path for path, header in files.items() for name in header}
    if _HEAD not in place:
        return
    with ExitStack() as stack:

        def read(name: str) -> torch.Tensor:
            file = stack.enter_context(open_tensors(place[name]))
            tensor: torch.Tensor = file.get_tensor(files[place[name]][name].name)
            return tensor.to(dtype)

        if not torch.equal(read(_HEAD), read(_EMBEDDING)):
            raise ModelError(f"{directory}: {_HEAD} is not the embedding that config.json says it is tied to")


def _size(tensor: StoredTensor) -> int:
    """Return the size in bytes."""
    return tensor.end - tensor.start


def _tile(target: torch.Tensor, block: torch.Tensor) -> None:
    """Fill a flat tensor with repeats of a block."""
    for start in range(0, len(target), len(block)):
        part = target[start : start + len(block)]
        part.copy_(block[: len(part)])
