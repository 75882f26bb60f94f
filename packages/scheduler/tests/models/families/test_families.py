"""Every architecture against transformers, through the paged pool: whole prompts, chunks, decodes and mixtures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.scheduler.tests.conftest import HYBRIDS
from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.attention.chunked import ChunkedAttention
from tercet.kernels.attention.torch_native import TorchNativeAttention, TorchNativeLatent
from tercet.kernels.ops.lora import LoRARows
from tercet.kernels.ops.recurrent import Segment, Segments
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.kv_budget import kv_shapes, state_layers
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.config.rope_config import RopeConfig
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.norms import FloatNorm
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights

Reference = Callable[..., Any]
PAGE_SIZE, MAX_PAGES = 4, 20
CPU = torch.device("cpu")


def load(directory: Path, dtype: str = "auto") -> CausalLM:
    model = build_model(load_config(directory, dtype))
    load_weights(model, directory)
    return model


def some_tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 389, (count,), generator=torch.Generator().manual_seed(seed))


def segments_of(sequences: Sequence[int], counts: Sequence[int]) -> Segments:
    """The tokens of each sequence of a step, in order; those of one token first."""
    singles = next((row for row, count in enumerate(counts) if count > 1), len(counts))
    ends = [*accumulate(counts)]
    rest = [Segment(ends[row] - counts[row], ends[row], sequences[row]) for row in range(singles, len(counts))]
    return Segments(torch.tensor(sequences[:singles], dtype=torch.int64), rest)


class Paged:
    """Sequences whose tokens go through a model in whatever pieces a test likes; pages lie in no order."""

    def __init__(self, model: CausalLM, sequences: int) -> None:
        config = model.config
        pages = sequences * MAX_PAGES
        latent = config.latent
        options = WorkerOptions(model=Path(), page_size=PAGE_SIZE)
        shapes = kv_shapes(options, config, model.shard)
        self.backend = ChunkedAttention(TorchNativeAttention) if latent is None else TorchNativeLatent()
        self.pool = KVPool([KVGroup(name="full", layers=shapes, pages=pages)], CPU, page_size=PAGE_SIZE)
        self.states: StatePool | None = None
        if config.recurrent is not None:
            self.states = StatePool(state_layers(config, model.shard), sequences, 0, CPU)
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        self.pages = shuffled.view(sequences, MAX_PAGES).to(torch.int32)
        self.lengths = [0] * sequences
        self.model = model

    def lora(self, rows: Sequence[tuple[int, torch.Tensor]]) -> LoRARows | None:
        """Which of the tokens of (sequence, its next tokens) have an adapter: none."""
        return None

    @torch.inference_mode()
    def step(self, *rows: tuple[int, torch.Tensor]) -> list[torch.Tensor]:
        """The logits of (sequence, its next tokens) for each row: float32 [tokens, vocab]."""
        logits = self.model.compute_logits(torch.cat(self.hidden(*rows)))
        return list(torch.split(logits, [len(tokens) for _, tokens in rows]))

    @torch.inference_mode()
    def hidden(self, *rows: tuple[int, torch.Tensor]) -> list[torch.Tensor]:
        """The hidden states of (sequence, its next tokens) for each row: [tokens, hidden]."""
        counts = [len(tokens) for _, tokens in rows]
        positions = [torch.arange(len(tokens)) + self.lengths[seq] for seq, tokens in rows]
        for seq, tokens in rows:
            self.lengths[seq] += len(tokens)
        kv_lens = [self.lengths[seq] for seq, _ in rows]
        attention = AttentionBatch(
            query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            page_table=self.pages[[seq for seq, _ in rows]],
            slot_mapping=torch.cat(
                [
                    self.pages[seq].long()[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
                    for (seq, _), places in zip(rows, positions, strict=True)
                ]
            ),
            page_size=PAGE_SIZE,
            host_query_lens=counts,
            host_kv_lens=kv_lens,
        )
        batch = ForwardBatch.planned(
            input_ids=torch.cat([tokens for _, tokens in rows]),
            positions=torch.cat(positions),
            sample_index=torch.empty(0, dtype=torch.int64),
            attention=[attention],
            backends=[self.backend],
            pool=self.pool,
            lora=self.lora(rows),
            states=self.states,
            segments=segments_of([seq for seq, _ in rows], counts),
        )
        hidden = self.model(batch.input_ids, batch.positions, batch)
        return list(torch.split(hidden, counts))


@torch.inference_mode()
def expected(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens[None]).logits[0].float()
    return logits


def test_a_whole_prompt(checkpoint: Path, reference: Reference) -> None:
    tokens = some_tokens(41, 1)
    [logits] = Paged(load(checkpoint), 1).step((0, tokens))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected(reference(checkpoint), tokens), atol=1e-4, rtol=0)


def test_chunks_and_decodes_mixed(family: Path, reference: Reference) -> None:
    model = reference(family)
    for tokens, logits in mixed_steps(load(family)):
        torch.testing.assert_close(logits, expected(model, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", HYBRIDS)
def test_chunks_and_decodes_of_hybrids(name: str, checkpoints: Callable[[str], Path], reference: Reference) -> None:
    """They differ from logits in float64 by no more than a few times the rounding of transformers, which states add
    up.
    """
    model, exact = reference(checkpoints(name)), reference(checkpoints(name), torch.float64)
    exact.set_experts_implementation("eager")
    for tokens, logits in mixed_steps(load(checkpoints(name))):
        wanted = expected(exact, tokens)
        rounding = float((expected(model, tokens) - wanted).abs().max())
        assert rounding < 1e-2
        torch.testing.assert_close(logits, wanted, atol=max(1e-4, 4 * rounding), rtol=0)


def mixed_steps(model: CausalLM) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens of two sequences with their logits: one decodes all along, the other joins in chunks and then
    decodes beside it.
    """
    first, second = some_tokens(47, 2), some_tokens(60, 3)
    paged = Paged(model, 2)
    [head] = paged.step((0, first[:9]))
    firsts, seconds = [head], []
    chunks = [*torch.split(second[:50], 17), *torch.split(second[50:], 1)]
    for index, token in enumerate(torch.split(first[9:], 1)):
        rows = [(0, token)]
        if index < len(chunks):
            rows.append((1, chunks[index]))
        logits = paged.step(*rows)
        firsts.append(logits[0])
        seconds += logits[1:]
    yield first, torch.cat(firsts)
    yield second, torch.cat(seconds)


def test_bfloat16(family: Path, reference: Reference) -> None:
    """Rounding differs from transformers by no more than transformers itself does from float32.

    Where experts weigh as much as DeepSeek's, that of most tokens: those whose router nearly chose others may get them.
    """
    tokens = some_tokens(41, 4)
    model = load(family, "bfloat16")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    sums = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, FloatNorm)}
    full = model.config.moe is not None and model.config.moe.float32_router
    routers = {name for name in dtypes if full and ".mlp.gate." in name}
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == sums | routers
    [logits] = Paged(model, 1).step((0, tokens))
    exact = expected(reference(family), tokens)
    theirs = expected(reference(family, torch.bfloat16), tokens)
    mine, transformers = ((given - exact).abs().mean(1) for given in (logits, theirs))
    typical = torch.median if full else torch.mean
    assert typical(mine) < 1.25 * typical(transformers)


@pytest.mark.parametrize("name", ["mistral", "qwen2_sliding", "qwen3_sliding", "gemma2", "gpt_oss"])
def test_the_window_counts(name: str, checkpoints: Callable[[str], Path]) -> None:
    """The checkpoints above do tell a model with its window from one without."""
    directory, tokens = checkpoints(name), some_tokens(41, 1)
    model = load(directory)
    blind = build_model(replace(model.config, windows=(0,) * model.config.layers))
    load_weights(blind, directory)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(blind, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"softcap": 0.0}),
        ("gemma2", {"logit_softcap": 0.0}),
        ("gemma2", {"embedding_scale": 1.0}),
        ("gemma2", {"attention_scale": None}),
        ("gemma3", {"local_rope": None}),
        ("gemma3", {"rope": RopeConfig(theta=1e5)}),
    ],
)
def test_what_a_gemma_has_of_its_own_counts(
    name: str, changes: dict[str, Any], checkpoints: Callable[[str], Path]
) -> None:
    directory, tokens = checkpoints(name), some_tokens(41, 1)
    model = load(directory)
    plain = build_model(replace(model.config, **changes))
    load_weights(plain, directory)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(plain, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama3_rope", "llama_linear", "llama_yarn", "gpt_oss", "deepseek_v3_yarn"])
def test_the_rope_scaling_counts(name: str, checkpoints: Callable[[str], Path]) -> None:
    directory, tokens = checkpoints(name), some_tokens(41, 1)
    model = load(directory)
    plain = build_model(replace(model.config, rope=replace(model.config.rope, scaling=None)))
    load_weights(plain, directory)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(plain, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1


def test_a_tied_head_takes_no_memory(checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints("llama_tied"))
    assert "lm_head.weight" not in model.state_dict()


def test_a_model_is_on_its_device_whole(checkpoints: Callable[[str], Path]) -> None:
    model = build_model(load_config(checkpoints("qwen3")), "meta")
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
