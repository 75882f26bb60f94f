"""Native kernels run every architecture as transformers does, in each number format."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from packages.scheduler.tests.conftest import FAMILIES
from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.native import abi
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.native.linear import Quantization
from tercet.kernels.ops.linear import quantize_int4
from tercet.kernels.ops.lora import LoRARows
from tercet.kernels.ops.quantized import QuantizedWeight, dequantize, quantize
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.models.config.quantized_config import StoredQuantization
from tercet.scheduler.models.layers.linear import Linear, MappedRows, Matrix, nothing
from tercet.scheduler.models.layers.shard import WHOLE, Shard
from tercet.scheduler.models.native import NativeCausalLM, unsupported_natively
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights

pytestmark = pytest.mark.skipif(bool(missing_library()), reason=missing_library())

PAGE_SIZE, PAGES = 4, 20


class Step:
    """Consecutive tokens of one sequence; each cache group has its own pages, in an order of its own."""

    lora: LoRARows | None = None
    replaced = None

    def __init__(self, pool: KVPool, start: int, count: int) -> None:
        self.pool = pool
        self.positions = torch.arange(start, start + count)
        self.attention = []
        for group in range(len(pool.groups)):
            pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(group)).int()
            slots = pages.long()[self.positions // PAGE_SIZE] * PAGE_SIZE + self.positions % PAGE_SIZE
            self.attention.append(
                AttentionBatch(
                    query_start=torch.tensor([0, count], dtype=torch.int32),
                    kv_lens=torch.tensor([start + count], dtype=torch.int32),
                    page_table=pages[None],
                    slot_mapping=slots,
                    page_size=PAGE_SIZE,
                    host_query_lens=[count],
                    host_kv_lens=[start + count],
                )
            )


def lend_blocks(model: nn.Module, kind: type[Matrix] = Linear) -> None:
    """Leave the weights of layers in blocks of 8 bits, as those of a GGUF file are."""
    for matrix in (module for module in model.modules() if isinstance(module, kind)):
        runs = matrix.take()
        matrix.weight.data = torch.cat(runs)
        for run, rows in enumerate(runs):
            matrix.set_mapped(run, MappedRows(quantize(rows.float(), "int8", (1, 32)), nothing))


class Served:
    """A checkpoint on native kernels, with one cache group for every other layer."""

    def __init__(
        self,
        directory: Path,
        dtype: str = "float32",
        *,
        quantization: Quantization = "none",
        keep_mapped: bool = True,
        in_blocks: bool = False,
    ) -> None:
        config = load_config(directory, dtype)
        self.plain = build_model(config)
        load_weights(self.plain, directory, keep_mapped=keep_mapped)
        if in_blocks:
            lend_blocks(self.plain.model)
        self.model = NativeCausalLM(self.plain, load_library(), quantization=quantization)
        shape = KVShape(page_size=PAGE_SIZE, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=config.dtype)
        groups = [
            KVGroup(name=f"{first}", layers=dict.fromkeys(range(first, config.layers, 2), shape), pages=PAGES)
            for first in range(min(2, config.layers))
        ]
        self.pool = KVPool(groups, torch.device("cpu"))

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
        """Of all tokens, computed in chunks of these sizes."""
        parts = []
        for end, count in zip(accumulate(chunks), chunks, strict=True):
            step = Step(self.pool, end - count, count)
            hidden = self.model(tokens[end - count : end].contiguous(), step.positions, step)
            parts.append(self.model.compute_logits(hidden))
        return torch.cat(parts)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 389, (41,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def expected(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens[None]).logits[0].float()
    return logits


def far(family: Path, dense: float) -> float:
    """The most that rounding may change a model, in parts of its logits: more, where it changes a token's experts."""
    return dense if family.name in FAMILIES else 1.5 * dense


def rounded(weights: torch.Tensor) -> torch.Tensor:
    """To 4 bits, along the last dimension."""
    steps, scales = quantize_int4(weights.reshape(-1, weights.shape[-1]))
    meant = (steps.float() - 8) * scales.float().repeat_interleave(32, 1)
    return meant[:, : weights.shape[-1]].view_as(weights)


def test_float32(native_family: Path, reference: Callable[..., Any], tokens: torch.Tensor) -> None:
    exact = expected(reference(native_family), tokens)
    whole = Served(native_family).logits(tokens, [41])
    torch.testing.assert_close(whole, exact, atol=1e-4, rtol=0)
    assert torch.equal(Served(native_family).logits(tokens, [9, 1, 17, 13, 1]), whole)  # to the bit, in any chunks


def mixed(pool: KVPool, rows: list[tuple[int, int]]) -> Any:
    """A step of rows, each the first token and the number of tokens of a sequence with pages of its own."""
    batches = []
    for group in range(len(pool.groups)):
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(group)).int().view(len(rows), -1)
        positions = [torch.arange(start, start + count) for start, count in rows]
        slots = [
            own.long()[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for own, at in zip(pages, positions, strict=True)
        ]
        counts, lengths = [count for _, count in rows], [start + count for start, count in rows]
        batches.append(
            AttentionBatch(
                query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
                kv_lens=torch.tensor(lengths, dtype=torch.int32),
                page_table=pages,
                slot_mapping=torch.cat(slots),
                page_size=PAGE_SIZE,
                host_query_lens=counts,
                host_kv_lens=lengths,
            )
        )
    return SimpleNamespace(lora=None, replaced=None, pool=pool, attention=batches, positions=torch.cat(positions))


@torch.inference_mode()
def test_a_row_is_the_same_beside_another(native_family: Path, tokens: torch.Tensor) -> None:
    served, (one, other) = Served(native_family), torch.split(tokens, [22, 19])
    parts = []
    for rows in ([(0, 21), (0, 1)], [(21, 1), (1, 18)]):  # a prompt beside a token, then the other way round
        ids = [sequence[start : start + count] for sequence, (start, count) in zip((one, other), rows, strict=True)]
        step = mixed(served.pool, rows)
        hidden = served.model(torch.cat(ids), step.positions, step)
        parts.append(torch.split(served.model.compute_logits(hidden), [count for _, count in rows]))
    for together, sequence in zip(zip(*parts, strict=True), (one, other), strict=True):
        assert torch.equal(torch.cat(together), Served(native_family).logits(sequence, [len(sequence)]))


def test_bfloat16_rounds_less_than_transformers(
    native_family: Path, reference: Callable[..., Any], tokens: torch.Tensor
) -> None:
    exact = expected(reference(native_family), tokens)
    theirs = expected(reference(native_family, torch.bfloat16), tokens)
    ours = Served(native_family, "bfloat16").logits(tokens, [30, 11])
    assert (ours - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


def test_int8_is_near(native_family: Path, reference: Callable[..., Any], tokens: torch.Tensor) -> None:
    exact = expected(reference(native_family), tokens)
    for dtype in ("float32", "bfloat16"):
        error = Served(native_family, dtype, quantization="int8").logits(tokens, [41]) - exact
        assert error.square().mean() < far(native_family, 0.2) ** 2 * exact.var()


def test_int4_is_what_its_rounded_weights_give(
    native_family: Path, reference: Callable[..., Any], tokens: torch.Tensor
) -> None:
    theirs = reference(native_family)
    for name, weight in theirs.named_parameters():
        if name.endswith(("_proj.weight", "lm_head.weight")):
            weight.data = rounded(weight.data)
        elif ".experts." in name and weight.ndim == 3:
            turned = native_family.name == "gpt_oss"  # outputs are its last dimension
            weight.data = rounded(weight.data.mT).mT if turned else rounded(weight.data)
    exact = expected(theirs, tokens)
    error = Served(native_family, quantization="int4").logits(tokens, [41]) - exact
    assert error.square().mean() < far(native_family, 0.1) ** 2 * exact.var()


EXPERTS = ["mixtral", "qwen2_moe", "gpt_oss", "glm4_moe"]
LENT = ["llama", "llama_tied", *EXPERTS, *(f"{name}/fused" for name in EXPERTS)]
"""One by one, in one tensor, and in one by turns."""


def test_threads_change_nothing(native_family: Path, tokens: torch.Tensor) -> None:
    served, library = Served(native_family), load_library()
    before, results = library.threads, []
    try:
        for threads in (1, 2):
            library.set_threads(threads)
            results.append(served.logits(tokens, [41]))
    finally:
        library.set_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lent_weights_are_those_that_are_loaded(native_family: Path, tokens: torch.Tensor, dtype: str) -> None:
    mapped, loaded = (
        Served(native_family, dtype, keep_mapped=keep_mapped).logits(tokens, [41]) for keep_mapped in (True, False)
    )
    assert torch.equal(mapped, loaded)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_the_same_in_one_tensor(
    checkpoints: Callable[[str], Path], name: str, tokens: torch.Tensor
) -> None:
    apart, together = (Served(checkpoints(form)).logits(tokens, [41]) for form in (name, f"{name}/fused"))
    assert torch.equal(apart, together)


@pytest.mark.parametrize("name", ["llama_linear", "gemma3"])
def test_only_float32_keeps_inputs_of_packed_weights(
    checkpoints: Callable[[str], Path], name: str, tokens: torch.Tensor
) -> None:
    formats = {}
    for dtype in ("float32", "bfloat16"):
        served = Served(checkpoints(name), dtype, in_blocks=True)
        exact = Served(checkpoints(name), dtype)
        error = served.logits(tokens, [41]) - exact.logits(tokens, [41])
        formats[dtype] = {layer.o.struct.format for layer in served.model._layers}
        assert error.abs().mean() < 0.1 * exact.logits(tokens, [41]).std()
    rounded = abi.FLOAT_BLOCKS if load_library().level == "portable" else abi.BLOCKS
    assert formats == {"float32": {abi.FLOAT_BLOCKS}, "bfloat16": {rounded}}


@pytest.mark.parametrize("name", ["llama_linear", "gemma3"])
def test_a_head_stays_in_blocks_if_its_inputs_are_rounded(
    checkpoints: Callable[[str], Path], name: str, tokens: torch.Tensor
) -> None:
    """A tied one is the embedding, too."""
    formats = {}
    for dtype in ("float32", "bfloat16"):
        plain = build_model(load_config(checkpoints(name), dtype))
        load_weights(plain, checkpoints(name), keep_mapped=True)
        lend_blocks(plain, Matrix)
        tied = plain.lm_head is None
        rows = (plain.model.embed_tokens if plain.lm_head is None else plain.lm_head)._mapped[0].rows
        assert isinstance(rows, QuantizedWeight)
        exact, model = dequantize(rows), NativeCausalLM(plain, load_library())
        hidden = torch.randn(5, exact.shape[1], generator=torch.Generator().manual_seed(2))
        wanted = hidden @ exact.T
        assert (model.head(hidden) - wanted).abs().max() < 0.03 * wanted.std()
        assert (model._embedding is None) == tied
        torch.testing.assert_close(model.head.rows(tokens), exact[tokens], rtol=0.004, atol=1e-6)
        formats[dtype] = model.head.struct.format
    rounded = abi.BFLOAT16 if load_library().level == "portable" else abi.BLOCKS
    assert formats == {"float32": abi.FLOAT32, "bfloat16": rounded}


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", LENT)
def test_weights_are_not_held_twice(checkpoints: Callable[[str], Path], name: str, quantization: Quantization) -> None:
    served = Served(checkpoints(name), quantization=quantization)
    held = [path for path, weight in served.plain.named_parameters() if weight.ndim > 1 and weight.numel()]
    assert not [path for path in held if not path.endswith("bias")]
    assert str(checkpoints(name)) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LENT)
def test_lent_weights_count_as_read_when_they_are_packed(checkpoints: Callable[[str], Path], name: str) -> None:
    reports: list[tuple[int, int]] = []
    model = build_model(load_config(checkpoints(name)))
    load_weights(model, checkpoints(name), lambda *report: reports.append(report), keep_mapped=True)
    (_, total), before = reports[0], reports[-1][0]
    assert before < total / 10
    NativeCausalLM(model, load_library())
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


def test_caches_of_several_sizes_are_refused(checkpoints: Callable[[str], Path]) -> None:
    served = Served(checkpoints("llama"))
    step: Any = Step(served.pool, 0, 1)
    caches = [served.pool.layer(index) for index in range(3)]
    caches[2] = (caches[2][0][1:], caches[2][1][1:])  # a page less than layer 0, whose pages it shares
    step.pool = SimpleNamespace(lora=None, replaced=None, group_of=served.pool.group_of, layer=caches.__getitem__)
    with pytest.raises(ValueError, match="a layer's cache is"):
        served.model(torch.tensor([1]), step.positions, step)


def test_what_is_not_in_the_model_is_refused_before_anything_is_written(checkpoints: Callable[[str], Path]) -> None:
    served = Served(checkpoints("llama"))
    for tokens, start in ((torch.tensor([389]), 0), (torch.tensor([-1]), 0), (torch.tensor([1]), 512)):
        step = Step(served.pool, 0, 1)
        with pytest.raises(ValueError, match=r"not in the vocabulary|past the last"):
            served.model(tokens, step.positions + start, step)
    assert all(not cache.any() for layer in range(3) for cache in served.pool.layer(layer))


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "shard", "why"),
    [
        ("gpt_oss", {}, torch.float32, WHOLE, ""),
        ("gpt_oss", {"quantization": StoredQuantization(method="mxfp4")}, torch.float32, WHOLE, "experts in few bits"),
        ("mixtral", {"quantization": StoredQuantization(method="awq")}, torch.float32, WHOLE, ""),
        ("mixtral", {}, torch.float32, Shard(0, 2), "no part of a model"),
        ("mixtral", {}, torch.float16, WHOLE, "do not read keys and values in float16"),
        ("mixtral", {"dtype": torch.float16}, torch.float32, WHOLE, "do not read weights in float16"),
        ("olmoe", {}, torch.float32, WHOLE, "norm no heads together"),
    ],
)
def test_what_native_kernels_do_not_run(
    checkpoints: Callable[[str], Path], name: str, changes: Any, dtype: torch.dtype, shard: Shard, why: str
) -> None:
    config = replace(load_config(checkpoints(name)), **changes)
    reason = unsupported_natively(config, dtype, shard)
    assert bool(reason) == bool(why)
    assert why in reason
