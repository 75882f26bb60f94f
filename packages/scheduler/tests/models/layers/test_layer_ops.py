"""A whole model on fused kernels, in Triton's interpreter where there is no GPU, against the same model on torch."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

pytest.importorskip("triton", reason="the fused operations are Triton's")

from packages.kernels.tests.pairwise import alternating
from packages.kernels.tests.quick_interpreter import quicken
from tercet.kernels.attention.api import AttentionBackend, NewTokens
from tercet.kernels.attention.chunked import ChunkedAttention
from tercet.kernels.attention.prompt_latents import PromptLatent
from tercet.kernels.attention.prompts import sdpa
from tercet.kernels.attention.torch_native import TorchNativeAttention, TorchNativeLatent
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.attention.triton_latent import TritonLatent
from tercet.kernels.device import default_device
from tercet.kernels.ops import sampler_ops
from tercet.kernels.triton import missing_triton
from tercet.kernels.triton.attention import rope
from tercet.kernels.triton.linear import linear
from tercet.kernels.triton.linear import quantized_gemv as quantised_row
from tercet.kernels.triton.moe import moe_gemv_quantized as expert_rows
from tercet.kernels.triton.sampling import sampler_ops as fused_ops
from tercet.protocol.messages.values import SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.kv_budget import kv_shapes, state_layers
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.layer_ops import TORCH, TritonLayerOps, layer_ops, set_ops
from tercet.scheduler.models.layers.shard import WHOLE
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights
from tercet.scheduler.testing.mxfp4_checkpoints import write_mxfp4
from tercet.scheduler.testing.quantized_checkpoints import KINDS, Grain, write_checkpoint

quicken()

DEVICE = default_device()
PROMPTS = [[3, 141, 59, 26, 5, 35, 89, 79, 32], [79, 3, 238]]
PARAMS = [
    SamplingParams(max_new_tokens=9, temperature=0.0),
    SamplingParams(max_new_tokens=9, temperature=1.2, top_p=0.9, seed=5),
]

ALIKE = [
    *("qwen2_moe", "olmoe", "minimax_m2", "glm", "smollm3", "gemma3", "deepseek_v2", "lfm2", "kimi_linear"),
    *("qwen3_next", "gemma4_moe", "ministral3"),
]
"""Families whose operations others have, too."""

pytestmark = pytest.mark.skipif(bool(missing_triton(DEVICE)), reason=missing_triton(DEVICE))


def generate(
    directory: Path,
    *,
    fused: bool,
    steps: int = 2,
    cached: torch.dtype | None = None,
    choices: int = 2,
    latents: Callable[[], AttentionBackend] = TritonLatent,
) -> tuple[list[list[int]], list[float]]:
    """(tokens of every step, the log-probability of each) of choices, prefilled together and then decoded."""
    config = load_config(directory)
    model = build_model(config, DEVICE)
    load_weights(model, directory)
    set_ops(model, TritonLayerOps() if fused else TORCH)
    options = WorkerOptions(model=directory, page_size=4, kv_cache_dtype="fp8_e4m3" if cached else "auto")
    whole, of_latents = (TritonAttention, latents) if fused else (TorchNativeAttention, TorchNativeLatent)
    backend = partial(ChunkedAttention, whole) if any(map(config.chunk_of, config.chunks)) else whole
    scales = {0: (0.7, 1.3)} if cached else None
    runner = ModelRunner(
        model,
        KVPool(
            [KVGroup(name="full", layers=kv_shapes(options, config, WHOLE), pages=8)],
            DEVICE,
            page_size=options.page_size,
            scales=scales,
        ),
        backend if config.latent is None else of_latents,
        slots=2,
        context_length=16,
        vocab_size=config.vocab_size,
        device=DEVICE,
        sampling_ops=fused_ops if fused else sampler_ops,
        states=StatePool(state_layers(config), 2, 0, DEVICE) if config.recurrent is not None else None,
    )
    inits = [
        SlotInit(
            slot=slot, tokens=pack_ints(tokens), prompt_tokens=len(tokens), choice=0, sampling=params, top_logprobs=0
        )
        for slot, (tokens, params) in enumerate(zip(PROMPTS[:choices], PARAMS, strict=False))
    ]
    pages = [PageUpdate(0, 0, [[5, 2, 7]]), PageUpdate(1, 0, [[1, 6]])][:choices]
    rows = [Row(slot, 0, len(tokens), sample=True) for slot, tokens in enumerate(PROMPTS[:choices])]
    tokens, logprobs = [], []
    for step in range(steps):
        result = runner.execute(
            Plan(step=step, introduce=inits if not step else [], pages=pages if not step else [], rows=rows)
        ).result()
        tokens.append(result.token_ids)
        logprobs += [value for row in range(choices) for value in unpack_floats(result.logprobs[row].chosen)]
        rows = [Row(row.slot, row.start + row.count, 1, sample=True) for row in rows]
    return tokens, logprobs


@pytest.mark.parametrize(
    "name",
    [
        *("llama_tied", "qwen3_sliding", "glm4_moe", "phi3_longrope", "granite", "gemma2", "gpt_oss"),
        *("deepseek_v3_moe", "qwen3_5", "granite_hybrid", "nemotron_h", "falcon_h1", "mamba", "mamba2"),
        *("olmo_hybrid", "gemma3n", "gemma4", "llama4", "mistral4"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALIKE),
    ],
)
def test_a_fused_model_says_the_same(name: str, checkpoints: Callable[[str], Path]) -> None:
    with np.errstate(all="ignore"):
        fused, scores = generate(checkpoints(name), fused=True)
    plain, expected = generate(checkpoints(name), fused=False)
    assert fused == plain
    assert scores == pytest.approx(expected, abs=1e-4)


def test_long_prompts_over_latents_are_expanded(checkpoints: Callable[[str], Path]) -> None:
    """The first of the prompts, in every layer; what the step has besides is computed over latents."""
    lengths, plain_kernel = list[int](), sdpa(SDPBackend.MATH)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        lengths.append(q.shape[2])
        return plain_kernel(q, k, v, scale)

    name, made = "deepseek_v3_moe", partial(PromptLatent, TritonLatent, [kernel], 9)
    with np.errstate(all="ignore"):
        fused, scores = generate(checkpoints(name), fused=True, latents=made)
    plain, expected = generate(checkpoints(name), fused=False)
    assert fused == plain
    assert scores == pytest.approx(expected, abs=1e-4)
    assert lengths[1:] == [16] * load_config(checkpoints(name)).layers, "after a trial, nine tokens padded to 16"


@pytest.mark.parametrize("name", ["qwen3_sliding", "olmoe"])
def test_only_decodes_are_rotated_by_the_backend(
    name: str, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer of every decode, and in no other step: others are rotated and stored before they attend."""
    given: list[NewTokens] = []
    stored: list[int] = []
    whole, apart = TritonAttention.attend_new, rope.rope_store

    def attend_new(*args: Any, **options: Any) -> torch.Tensor:
        given.append(args[4])
        return whole(*args, **options)

    def rope_store(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        stored.append(len(q))
        return apart(q, *args, **options)

    monkeypatch.setattr(TritonAttention, "attend_new", attend_new)
    monkeypatch.setattr(rope, "rope_store", rope_store)
    with np.errstate(all="ignore"):
        generate(checkpoints(name), fused=True, steps=2)
    layers = load_config(checkpoints(name)).layers
    assert stored == [sum(map(len, PROMPTS))] * layers
    assert [len(new.k) for new in given] == [2] * layers
    assert {new.norms is not None for new in given} == {name == "qwen3_sliding"}


def test_a_fused_model_with_a_cache_of_8_bits_says_the_same(checkpoints: Callable[[str], Path]) -> None:
    with np.errstate(all="ignore"):
        fused, scores = generate(checkpoints("llama_tied"), fused=True, cached=torch.float8_e4m3fn)
    plain, expected = generate(checkpoints("llama_tied"), fused=False, cached=torch.float8_e4m3fn)
    assert fused == plain
    assert scores == pytest.approx(expected, abs=1e-4)
    _, exact = generate(checkpoints("llama_tied"), fused=False)
    assert scores != pytest.approx(exact, abs=1e-2)


QUANTISED = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 250,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 7,
    "tie_word_embeddings": False,
}
GEMMA_NORMS = {
    f"model.layers.{layer}.{name}.weight": torch.linspace(-0.5, 0.5, size)
    for layer in (0, 1)
    for name, size in {
        "self_attn.q_norm": 32,
        "self_attn.k_norm": 32,
        "pre_feedforward_layernorm": 64,
        "post_feedforward_layernorm": 64,
    }.items()
}
MIXTURE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
GPT_OSS = {
    **QUANTISED,
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
}


def test_experts_as_gpt_oss_is_published_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefilled in tiles, decoded by kernels for a few tokens."""
    full = write_mxfp4(tmp_path / "model", GPT_OSS)
    few: list[int] = []
    few_tokens = expert_rows.few_tokens

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        few.append(len(x))
        return few_tokens(x, *args, **options)

    monkeypatch.setattr(expert_rows, "few_tokens", counted)
    with np.errstate(all="ignore"):
        fused, scores = generate(tmp_path / "model", fused=True)
    plain, expected = generate(full, fused=False)
    assert fused == plain
    assert scores == pytest.approx(expected, abs=1e-3)
    assert few == [2, 2], "of two layers"


WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in ("awq", "packed zeros", "channel", "deepseek")),
    ("channel", MIXTURE),
    ("awq", MIXTURE),
    ("gptq", GEMMA),
]
MORE_WEIGHTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in KINDS if (kind, {}) not in WEIGHTS]
"""Other formats of the weights that kernels read in the same way."""
CACHES = [None, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("weights", "cached"),
    [
        *alternating(WEIGHTS, CACHES),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(MORE_WEIGHTS, CACHES)),
    ],
)
def test_a_quantised_fused_model_says_what_its_weights_in_full_say(
    weights: tuple[str, dict[str, Any]], cached: torch.dtype | None, tmp_path: Path
) -> None:
    kind, more = weights
    kept = ("block_sparse_moe.gate",) if more is MIXTURE else ()
    grain = Grain(group=32, block=(32, 32))
    beside = GEMMA_NORMS if more is GEMMA else None
    full = write_checkpoint(kind, tmp_path / "model", QUANTISED | more, grain, full=kept, beside=beside)
    with np.errstate(all="ignore"):
        fused, scores = generate(tmp_path / "model", fused=True, cached=cached)
    plain, expected = generate(full, fused=False, cached=cached)
    assert fused == plain
    assert scores == pytest.approx(expected, abs=1e-3)


WIDE = QUANTISED | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "dtype": "float16",
}


@pytest.mark.parametrize("kind", ["full", "deepseek", "awq"])
def test_one_choice_goes_through_layers_of_one_row(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, and wide enough for kernels that norm, gate and add by themselves."""
    full = write_checkpoint("awq" if kind == "full" else kind, tmp_path / "model", WIDE, Grain(64, (64, 64)))
    directory = full if kind == "full" else tmp_path / "model"
    called: list[Any] = []

    def counted(module: Any) -> None:
        gemv = module.gemv

        def call(*args: Any, **options: Any) -> Any:
            called.append(module)
            return gemv(*args, **options)

        monkeypatch.setattr(module, "gemv", call)

    counted(linear)
    counted(quantised_row)
    plain, expected = generate(full, fused=False, steps=3, choices=1)
    assert called == []
    with np.errstate(all="ignore"):
        fused, scores = generate(directory, fused=True, steps=3, choices=1)
    assert fused == plain
    assert scores == pytest.approx(expected, abs=2e-2)
    assert (linear if kind == "full" else quantised_row) in called


def test_a_cpu_is_served_by_torch() -> None:
    assert layer_ops(torch.device("cpu")) is TORCH
