"""Memory of a model on every rank, computed from config.json alone: nothing is loaded, and no device is needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from tercet.scheduler.architectures import is_ours, text_architecture
from tercet.scheduler.config import ConfigError
from tercet.scheduler.device.device_memory import total_bytes
from tercet.scheduler.executor.kv_budget import KVBudget, kv_shapes, state_layers
from tercet.scheduler.executor.ranks.expert_loads import placements_of
from tercet.scheduler.executor.worker_limits import served_context_length
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import SLOW_ON_CPU, read_json, served_dtype
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.expert_parallel.tokens import with_attention_ranks, with_experts
from tercet.scheduler.models.layers.latent_attention import HeadProjections
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import ExpertLinear
from tercet.scheduler.models.layers.shard import Shard, SingleRankCollectives, Split, Stage
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.quantized_checkpoints import quantized_bytes

_SHARE = 0.9
"""Share of memory for weights and the KV cache if --mem-fraction-static is not given."""
_UNITS = "KMGT"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank."""

    layers: range
    weights: int
    """Bytes of weights and tables."""
    token: int
    """Bytes of the keys and values of one token."""
    tokens: int
    """Tokens that fit in the KV cache; 0 if not even a page does."""
    missing: int
    """Bytes by which weights exceed their share of memory, or one page does not fit."""


def rank_memory(options: WorkerOptions, config: ModelConfig, shard: Shard, memory: int) -> RankMemory:
    """Return the memory of one rank with `memory` bytes. Raise ValueError for a model that cannot be split so."""
    device = torch.device("cpu")
    shapes = kv_shapes(options, config, shard)
    weights = weights_bytes(build_model(config, "meta", shard), in_full=options.device == "cpu")
    left = int(memory * (options.mem_fraction_static or _SHARE)) - weights
    if options.kv_cache_bytes is not None:
        left = min(left, options.kv_cache_bytes)
    budget = KVBudget(options, config, shapes, device, replace(shard, stage=Stage(count=shard.stage.count)))
    token = sum(shape.page_bytes for shape in shapes.values()) // options.page_size
    try:
        tokens = budget.sizes_in(left).pages * options.page_size
    except ValueError:  # not one page, or not the recurrent states, fit
        tokens = 0
    return RankMemory(
        layers=shard.stage.layers(config.layers),
        weights=weights,
        token=token,
        tokens=tokens,
        missing=0 if tokens else max(1, options.page_size * token - left),
    )


def weights_bytes(model: CausalLM, *, in_full: bool = False) -> int:
    """Return the bytes of a model's weights and tables once a checkpoint is loaded.

    With `in_full`, layers that are quantized by other methods than MXFP4 are dequantized, as on a CPU.
    """
    quantization = model.config.quantization
    if quantization is not None and in_full and quantization.method != "mxfp4":
        quantization = None
    never = Linear if quantization is not None and quantization.method == "mxfp4" else HeadProjections
    total = sum(buffer.nbytes for buffer in model.buffers())
    for module in model.modules():
        few = isinstance(module, Linear | ExpertLinear) and module.may_be_quantized and not isinstance(module, never)
        for name, parameter in module.named_parameters(recurse=False):
            if quantization is not None and name == "weight" and few:
                *several, outputs, inputs = parameter.shape
                each = quantized_bytes(outputs, inputs, quantization, tall=not several)
                total += each * (several[0] if several else 1)
            else:
                total += parameter.nbytes
    return total


def report(options: WorkerOptions, split: Split, hosts: int, memory: int, name: str) -> tuple[list[str], bool]:
    """Return lines about the memory of a model on ranks of `hosts` with `memory` bytes each, and whether it fits.

    Raise ConfigError for a split that no memory makes possible.
    """
    config = _config_of(options)
    if split.ranks % hosts or split.ranks < hosts:
        raise ConfigError(f"{split.ranks} processes cannot be split evenly over --nnodes {hosts}")
    known: dict[tuple[int, int, int], RankMemory] = {}  # ranks of a stage differ in rows of the vocabulary and experts
    ranks = []
    try:
        placements = placements_of(options)
        for one in (unlinked_shard(split, rank) for rank in range(split.ranks)):
            if options.attention_ranks > 1:
                shard = with_attention_ranks(one, placements=placements)
            else:
                shard = with_experts(one, options.expert_parallel_size, placements=placements)
            key = shard.stage.number, len(shard.uneven_span(config.vocab_size)), shard.expert_group
            if key not in known:
                known[key] = rank_memory(options, config, shard, memory)
            ranks.append(known[key])
    except ValueError as error:
        raise ConfigError(f"{name} cannot be split in this way: {error}") from error
    dtype = str(config.dtype).removeprefix("torch.")
    few = "" if config.quantization is None else f", weights in {config.quantization.method}"
    lines = [
        f"{name}: {config.architecture}, {config.layers} layers, {dtype}{few}",
        f"ranks: {split.ranks} ({split.stages} stages of {split.shards}), hosts: {hosts}, "
        f"memory of each rank: {size_text(memory)}",
    ]
    lines += _table(ranks, split.ranks // hosts)
    lines += _verdict(options, config, ranks, memory)
    return lines, not any(rank.missing for rank in ranks)


def _config_of(options: WorkerOptions) -> ModelConfig:
    architecture = text_architecture(read_json(options.model / "config.json"))
    if not is_ours(architecture):
        raise ConfigError(f"{architecture} runs on transformers' modules, whose memory is not known before they load")
    slow = SLOW_ON_CPU if options.device == "cpu" else ""
    config = load_config(options.model, served_dtype(options.model, options.dtype, slow=slow))
    return replace(config, context_length=served_context_length(options, config))


def _table(ranks: Sequence[RankMemory], of_host: int) -> list[str]:
    """Return a table with a line for each run of equal ranks of a host."""
    rows = [("ranks", "host", "layers", "weights", "KV cache of a token", "tokens that fit")]
    for (host, memory), run in groupby(range(len(ranks)), lambda rank: (rank // of_host, ranks[rank])):
        first, *others = run
        numbers = f"{first}-{others[-1]}" if others else str(first)
        layers = f"{memory.layers.start}-{memory.layers.stop - 1}"
        rows.append(
            (numbers, str(host), layers, size_text(memory.weights), f"{memory.token:,} B", f"{memory.tokens:,}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _verdict(options: WorkerOptions, config: ModelConfig, ranks: Sequence[RankMemory], memory: int) -> list[str]:
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank].missing)
    share = options.mem_fraction_static or _SHARE
    if missing := ranks[worst].missing:
        return [
            f"does not fit: rank {worst} has {size_text(ranks[worst].weights)} of weights, and lacks "
            f"{size_text(missing)} in {share:g} of {size_text(memory)}: use more ranks, or weights in fewer bits"
        ]
    tokens = min(rank.tokens for rank in ranks)
    lines = [f"fits: {tokens:,} tokens, as many as the rank with the fewest has, in {share:g} of memory"]
    if options.attention_ranks > 1:
        lines.append(f"each rank has a KV cache of its own: {options.attention_ranks * tokens:,} tokens in all")
    if tokens < config.context_length:
        lines.append(f"the context length would be lowered from {config.context_length:,} to {tokens:,} tokens")
    if state_layers(config):
        lines.append("beside tokens, the cache has recurrent states of all running requests")
    return [*lines, "the server measures what its largest step takes of the rest, and may then have fewer tokens"]


def unlinked_shard(split: Split, rank: int) -> Shard:
    """Return the shard of a rank that communicates with no other."""
    number, shard = split.place_of(rank)
    return Shard(shard, split.shards, SingleRankCollectives(), Stage(number, split.stages))


def available_memory(device: str, ranks: int) -> int:
    """Return the memory that each of the ranks of this machine would have: a GPU's, or a share of the machine's."""
    if device != "cpu" and torch.cuda.is_available():
        return total_bytes(torch.device("cuda", int(device.partition(":")[2] or 0)))
    return total_bytes(torch.device("cpu")) // max(1, ranks)


def size_text(size: int) -> str:
    """Return bytes in binary units: 17.6 GiB."""
    value, unit = float(size), ""
    for each in _UNITS:
        if value < 1024:
            break
        value, unit = value / 1024, f"{each}i"
    return f"{value:.1f} {unit}B" if unit else f"{size} B"
