"""Kernels that torch brings, beside Tercet's own, for the shapes of a server's layers.

The figures are for the tables by which a kernel is chosen. Each product goes through more weights than a cache holds. A
kernel that torch refuses here is recorded with its words.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.device import has_failed
from tercet.kernels.ops.moe import QuantizedExperts
from tercet.kernels.ops.quantized import Format, QuantizedWeight
from tercet.kernels.tools.bench import PAGE_SIZE, measure_recorded
from tercet.kernels.tools.check import make_batch
from tercet.kernels.triton.linear.quantized import linear_quantized
from tercet.kernels.triton.moe.moe import fused_moe
from tools.gpu_stages.processes import gathered
from tools.gpu_stages.scale import Mixture, Results, Scale

_BUDGET = 0.05
"""Seconds of one measurement."""
_BLOCK = 128
_E4M3 = torch.float8_e4m3fn

Calls = Sequence[Callable[[], object]]


def time_kernels(scale: Scale) -> Iterator[Results]:
    """Yield microseconds of each kernel: attention of prompts, the products of a layer, and a mixture's experts."""
    for found in gathered(partial(_time, scale), [*_GROUPS], min(1, scale.processes)):
        yield {"timed": found}


def _time(scale: Scale, name: str) -> Iterator[Results]:
    """Yield the microseconds of a kernel by size, or the reason why torch refuses it."""
    with torch.inference_mode():
        for size, seconds in _GROUPS[name](scale):
            yield {size: seconds}


def _timed(scale: Scale, make: Callable[[], Calls]) -> float | str:
    """Return the microseconds of one of the calls, or why it is refused. Raises if the device fails."""
    try:
        calls = make()
        seconds = measure_recorded(lambda: [call() for call in calls], scale.device, 1, _BUDGET)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if has_failed(error):
            raise
        return f"refused: {str(error).partition(chr(10))[0][:160]}"
    return seconds / len(calls) * 1e6


def _prompts(scale: Scale, kernel: Callable[[Scale, int, int], Calls]) -> Iterator[tuple[str, float | str]]:
    """Yield prompts that fill a step: one long one, and several shorter ones of equal length."""
    for count in (1, 4, 16):
        length = scale.prompt // count
        yield f"{count} of {length}", _timed(scale, partial(kernel, scale, count, length))


def _sdpa(backend: SDPBackend, scale: Scale, count: int, length: int) -> Calls:
    shape = scale.large
    sizes = [(count, heads, length, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = (torch.randn(size, device=scale.device).to(scale.dtype) for size in sizes)

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return [run]


def _own_attention(scale: Scale, count: int, length: int) -> Calls:
    shape, batch = scale.large, make_batch([(length, length)] * count, PAGE_SIZE, scale.device)
    pages = int(batch.page_table.max()) + 1
    caches = torch.randn(2, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim, device=scale.device).to(scale.dtype)
    q = torch.randn(count * length, shape.heads, shape.head_dim, device=scale.device).to(scale.dtype)
    backend = TritonAttention()
    backend.plan(batch)
    return [lambda: backend.attend(q, caches[0], caches[1], AttentionParams(scale=shape.head_dim**-0.5))]


def _layer(scale: Scale, kernel: Callable[..., Calls]) -> Iterator[tuple[str, float | str]]:
    """Yield the four products of a layer of the large model, summed, by rows."""
    for rows in scale.torch_rows:
        parts = [_timed(scale, partial(kernel, scale, rows, n, k)) for n, k in layer_sizes(scale)]
        times = [part for part in parts if isinstance(part, float)]
        refusals = [part for part in parts if isinstance(part, str)]
        yield f"{rows} rows", refusals[0] if refusals else sum(times)


def layer_sizes(scale: Scale) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of the products of a layer of the large model."""
    shape = scale.large
    heads = shape.heads * shape.head_dim
    return [
        (heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        (shape.hidden, heads),
        (2 * shape.inner, shape.hidden),
        (shape.hidden, shape.inner),
    ]


def copies(scale: Scale, nbytes: float) -> range:
    """Return as many places as weights of so many bytes are needed to exceed a cache."""
    return range(max(2, min(24, int(scale.weights_at_once / nbytes))))


def _full(scale: Scale, rows: int, n: int, k: int) -> Calls:
    x = torch.randn(rows, k, device=scale.device).to(scale.dtype)
    weights = [torch.randn(n, k, device=scale.device).to(scale.dtype) for _ in copies(scale, n * k * 2)]
    return [partial(F.linear, x, weight) for weight in weights]


def _scaled(scales: str, scale: Scale, rows: int, n: int, k: int) -> Calls:
    """Return products in fp8 with scales of a tensor, of rows, or of blocks."""
    device = scale.device
    x = torch.randn(rows, k, device=device).to(_E4M3)
    weights = [torch.randn(n, k, device=device).to(_E4M3) for _ in copies(scale, n * k)]
    match scales:
        case "tensor":
            factors = torch.ones((), device=device), torch.ones((), device=device)
        case "row":
            factors = torch.ones(rows, 1, device=device), torch.ones(1, n, device=device)
        case _:
            blocks = -(-k // _BLOCK)
            factors = (
                torch.ones(blocks, rows, device=device).t(),
                torch.ones(-(-n // _BLOCK), blocks, device=device).t(),
            )
    return [partial(torch._scaled_mm, x, weight.t(), *factors, out_dtype=torch.bfloat16) for weight in weights]


def _integers(scale: Scale, rows: int, n: int, k: int) -> Calls:
    x = torch.randint(-127, 127, (rows, k), device=scale.device, dtype=torch.int8)
    weights = [torch.randint(-127, 127, (n, k), device=scale.device, dtype=torch.int8) for _ in copies(scale, n * k)]
    return [partial(torch._int_mm, x, weight.t()) for weight in weights]


def _own_product(kind: Format, block: tuple[int, int], scale: Scale, rows: int, n: int, k: int) -> Calls:
    x = torch.randn(rows, k, device=scale.device).to(scale.dtype)
    size = 0.5 if kind == "int4" else 1
    weights = [random_weight(kind, block, n, k, scale) for _ in copies(scale, n * k * size)]
    return [partial(linear_quantized, x, weight) for weight in weights]


def random_weight(kind: Format, block: tuple[int, int], n: int, k: int, scale: Scale) -> QuantizedWeight:
    """Return a weight with random codes, each a number, and scales of 1."""
    packed = kind in ("int4", "mxfp4")
    codes = torch.randint(0, 120, (n, k // 2 if packed else k), device=scale.device, dtype=torch.uint8)
    width = min(block[1], k)
    scales = torch.ones(-(-n // block[0]), -(-k // width), device=scale.device)
    if kind == "mxfp4":
        scales = torch.full_like(scales, 127, dtype=torch.uint8)
    zeros = torch.full_like(scales, 8.0) if kind == "int4" else None
    codes = codes.view(torch.int8) if kind == "int8" else codes
    return QuantizedWeight(format=kind, codes=codes, scales=scales, zeros=zeros, block=(block[0], width))


def _experts(scale: Scale, kernel: Callable[..., Calls]) -> Iterator[tuple[str, float | str]]:
    """Yield both products of the first mixture's experts by tokens."""
    mixture = next(iter(scale.mixtures.values()))
    for tokens in scale.expert_tokens:
        yield f"{tokens} tokens", _timed(scale, partial(kernel, scale, mixture, tokens))


def _chosen(scale: Scale, mixture: Mixture, tokens: int) -> torch.Tensor:
    """Return random experts of each token, int64 [tokens, top_k]."""
    chance = torch.Generator().manual_seed(0)
    each = [torch.randperm(mixture.experts, generator=chance)[: mixture.top_k] for _ in range(tokens)]
    return torch.stack(each).to(scale.device)


def _expert_sizes(mixture: Mixture) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (outputs, inputs) of both projections."""
    hidden, inner = mixture.config["hidden_size"], mixture.config["moe_intermediate_size"]
    return (2 * inner, hidden), (hidden, inner)


def _both(calls: Sequence[Calls]) -> Calls:
    """Return calls that compute both projections of one set of weights."""
    return [lambda pair=pair: [call() for call in pair] for pair in zip(*calls, strict=True)]  # type: ignore[misc]


def _grouped(scale: Scale, mixture: Mixture, tokens: int) -> Calls:
    chosen = _chosen(scale, mixture, tokens).flatten()
    ends, calls = chosen.bincount(minlength=mixture.experts).cumsum(0).int(), []
    for n, k in _expert_sizes(mixture):
        x = torch.randn(len(chosen), k, device=scale.device).to(torch.bfloat16)
        weights = [
            torch.randn(mixture.experts, n, k, device=scale.device, dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(3)
        ]
        calls.append([partial(torch._grouped_mm, x, weight, offs=ends) for weight in weights])
    return _both(calls)


def _scaled_grouped(scale: Scale, mixture: Mixture, tokens: int) -> Calls:
    chosen, device = _chosen(scale, mixture, tokens).flatten(), scale.device
    ends, calls = chosen.bincount(minlength=mixture.experts).cumsum(0).int(), []
    for n, k in _expert_sizes(mixture):
        x = torch.randn(len(chosen), k, device=device).to(_E4M3)
        ones = torch.ones(len(chosen), device=device), torch.ones(mixture.experts, n, device=device)
        options: dict[str, Any] = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        weights = [torch.randn(mixture.experts, n, k, device=device).to(_E4M3).transpose(1, 2) for _ in range(3)]
        calls.append([partial(torch._scaled_grouped_mm, x, weight, *ones, **options) for weight in weights])
    return _both(calls)


def _own_experts(kind: Format | None, scale: Scale, mixture: Mixture, tokens: int) -> Calls:
    """Return whole mixtures, with gates and sums, which torch's grouped products leave out."""
    chosen = _chosen(scale, mixture, tokens)
    x = torch.randn(tokens, mixture.config["hidden_size"], device=scale.device).to(scale.dtype)
    share = torch.full(chosen.shape, 1 / mixture.top_k, device=scale.device)
    calls = []
    for _ in range(3):
        both = [_own_expert(kind, scale, mixture.experts, n, k) for n, k in _expert_sizes(mixture)]
        calls.append(partial(fused_moe, x, share, chosen, *both))
    return calls


def _own_expert(kind: Format | None, scale: Scale, count: int, n: int, k: int) -> torch.Tensor | QuantizedExperts:
    if kind is None:
        return torch.randn(count, n, k, device=scale.device).to(scale.dtype)
    return QuantizedExperts(random_weight(kind, _BLOCKS[kind], count * n, k, scale), count)


_BLOCKS: dict[Format, tuple[int, int]] = {
    "fp8": (1, 1 << 30),
    "int8": (1, 1 << 30),
    "int4": (1, _BLOCK),
    "mxfp4": (1, 32),
}

_GROUPS: dict[str, Callable[[Scale], Iterator[tuple[str, float | str]]]] = {
    "attention, cuDNN": partial(_prompts, kernel=partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    "attention, flash": partial(_prompts, kernel=partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    "attention, own": partial(_prompts, kernel=_own_attention),
    "product, full": partial(_layer, kernel=_full),
    "product, _scaled_mm, tensor": partial(_layer, kernel=partial(_scaled, "tensor")),
    "product, _scaled_mm, row": partial(_layer, kernel=partial(_scaled, "row")),
    "product, _scaled_mm, block": partial(_layer, kernel=partial(_scaled, "block")),
    "product, own fp8": partial(_layer, kernel=partial(_own_product, "fp8", _BLOCKS["fp8"])),
    "product, own fp8 block": partial(_layer, kernel=partial(_own_product, "fp8", (_BLOCK, _BLOCK))),
    "product, _int_mm": partial(_layer, kernel=_integers),
    "product, own int8": partial(_layer, kernel=partial(_own_product, "int8", _BLOCKS["int8"])),
    "product, own int4": partial(_layer, kernel=partial(_own_product, "int4", _BLOCKS["int4"])),
    "experts, _grouped_mm": partial(_experts, kernel=_grouped),
    "experts, own": partial(_experts, kernel=partial(_own_experts, None)),
    "experts, _scaled_grouped_mm": partial(_experts, kernel=_scaled_grouped),
    "experts, own fp8": partial(_experts, kernel=partial(_own_experts, "fp8")),
    "experts, own int4": partial(_experts, kernel=partial(_own_experts, "int4")),
    "experts, own mxfp4": partial(_experts, kernel=partial(_own_experts, "mxfp4")),
}
