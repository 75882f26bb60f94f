"""Sizes of the measurements, models of those shapes, and requests to them."""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercet.scheduler.model_files import TOKENIZER_FILES, resolve_model
from tercet.scheduler.testing.quantized_checkpoints import PUBLIC_GRAIN, Grain

Results = dict[str, Any]

Request = tuple[list[int], int]
"""(prompt, tokens of the answer)"""


@dataclass(frozen=True)
class Shape:
    """Size of a model, by the names of config.json."""

    architecture: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    @property
    def weights(self) -> int:
        """Return the parameters that one token reads."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    @property
    def cached(self) -> int:
        """Return the numbers in the KV cache per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def config(self, context: int) -> dict[str, Any]:
        """Return config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.architecture.removesuffix("ForCausalLM").lower(),
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": context,
            "rope_theta": 500000.0,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Mixture of experts: its config.json, and the numbers that a step reads."""

    config: Mapping[str, Any]
    batches: tuple[int, ...]
    experts: int
    top_k: int
    sparse_layers: int
    expert: int
    """Weights of one expert of one layer."""
    other: int
    """Weights that every step reads, of all layers."""
    cached: int
    """Numbers in the KV cache per token, of all layers."""
    expert_size: float = 0.0
    """Bytes of an expert's weight, with its share of scales; 0 for those of the model's dtype."""

    def touched(self, rows: int) -> float:
        """Return the expected number of experts of a layer that rows with random choices read."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)

    def weight_bytes(self, rows: int, size: int) -> float:
        """Return the bytes of weights that a step of some rows reads, of which others have `size` bytes each."""
        experts = self.sparse_layers * self.touched(rows) * self.expert * (self.expert_size or size)
        return self.other * size + experts


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of all measurements: the full ones, or tiny ones for a test of the stages."""

    device: torch.device
    dtype: torch.dtype
    large: Shape
    """Llama-3.1-8B."""
    others: dict[str, Shape]
    mixtures: Mapping[str, Mixture]
    batches: tuple[int, ...] = (1, 32, 256)
    context: int = 1024
    served_context: int = 131_072
    """Longest request of the large model, which a server allows by default."""
    prompt: int = 8192
    launched: tuple[int, ...] = (512, 2048, 8192)
    decodes: int = 200
    traced: int = 50
    requests: int = 500
    running: int = 320
    """Concurrent requests that fit into the KV cache."""
    longest_input: int = 4096
    longest_output: int = 2048
    sample: int = 64
    sample_output: int = 256
    small_requests: int = 256
    small_lengths: tuple[int, int] = (100, 1024)
    prefix: int = 2048
    compared: Shape = Shape("LlamaForCausalLM", 1024, 2816, 2, 8, 2, 128, 4096)
    """Shape of quantized checkpoints that are compared with their dequantized weights."""
    grain: Grain = PUBLIC_GRAIN
    compared_tokens: int = 128
    quantised_batches: tuple[int, ...] = (1, 32)
    draft_rows: int = 64
    """Highest number of rows of a step in which choices have several."""
    draft_batches: tuple[int, ...] = (1, 8)
    draft_counts: tuple[int, ...] = (1, 2, 4, 8)
    """Rows of each choice, up to the highest possible number."""
    tiled_rows: tuple[int, ...] = (16, 64, 128, 256, 512)
    """Rows of layers with quantized weights."""
    torch_rows: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 2048, 8192)
    """Rows of products by torch's own kernels."""
    way_rows: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
    """Rows of 8-bit products by each way."""
    expert_tokens: tuple[int, ...] = (1, 32, 256, 2048)
    weights_at_once: int = 300_000_000
    """Bytes of different weights that a measured product goes through, more than any cache has."""
    operation_tokens: int = 16384
    operation_width: int = 4096
    operation_rows: int = 256
    operation_context: int = 4096
    processes: int = 8
    """Processes that check and compile kernels; 0 to use the stage's own process."""


LLAMA_8B = Shape("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128, 128_256)
QWEN_06B = Shape("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True)
QWEN_14B = Shape("Qwen3ForCausalLM", 5120, 17408, 40, 40, 8, 128, 151_936)


def _qwen3(layers: int) -> Mixture:
    """Return Qwen3-30B-A3B with some of its 48 layers."""
    hidden, inner, heads, kv_heads, dim, vocab = 2048, 768, 32, 4, 128, 151_936
    config = {
        **Shape("Qwen3MoeForCausalLM", hidden, 6144, layers, heads, kv_heads, dim, vocab).config(0),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": inner,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return Mixture(
        config=config,
        batches=(1, 32, 256),
        experts=128,
        top_k=8,
        sparse_layers=layers,
        expert=3 * hidden * inner,
        other=layers * hidden * dim * 2 * (heads + kv_heads) + vocab * hidden,
        cached=layers * 2 * kv_heads * dim,
    )


def _deepseek() -> Mixture:
    """Return DeepSeek-V2-Lite."""
    hidden, inner, dense, layers, heads, vocab = 2048, 1408, 10944, 27, 16, 102_400
    rank, rope, nope, value = 512, 64, 128, 128
    config = {
        **Shape("DeepseekV2ForCausalLM", hidden, dense, layers, heads, heads, nope + rope, vocab).config(0),
        "model_type": "deepseek_v2",
        "moe_intermediate_size": inner,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }
    attention = hidden * heads * (nope + rope) + hidden * (rank + rope) + heads * (rank * (nope + value))
    attention += heads * value * hidden
    shared = 3 * hidden * inner * 2
    return Mixture(
        config=config,
        batches=(1, 32, 256),
        experts=64,
        top_k=6,
        sparse_layers=layers - 1,
        expert=3 * hidden * inner,
        other=layers * attention + (layers - 1) * shared + 3 * hidden * dense + vocab * hidden,
        cached=layers * (rank + rope),
    )


def _gpt_oss(layers: int, experts: int, batches: tuple[int, ...]) -> Mixture:
    """Return a gpt-oss, whose experts are in MXFP4: half a byte a weight, and a byte for 32 of them."""
    hidden, heads, kv_heads, dim, vocab = 2880, 64, 8, 64, 201_088
    config = {
        **Shape("GptOssForCausalLM", hidden, hidden, layers, heads, kv_heads, dim, vocab).config(0),
        "model_type": "gpt_oss",
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
            ],
        },
    }
    return Mixture(
        config=config,
        batches=batches,
        experts=experts,
        top_k=4,
        sparse_layers=layers,
        expert=3 * hidden * hidden,
        other=layers * hidden * dim * 2 * (heads + kv_heads) + vocab * hidden,
        cached=layers * 2 * kv_heads * dim,
        expert_size=0.5 + 1 / 32,
    )


PUBLIC_MIXTURES = {
    "qwen3-30b-a3b, 24 layers": _qwen3(24),
    "deepseek-v2-lite": _deepseek(),
    "gpt-oss-20b": _gpt_oss(24, 32, (1, 32, 256)),
    "gpt-oss-120b": _gpt_oss(36, 128, (1, 4, 64)),
}
FULL = Scale(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    large=LLAMA_8B,
    others={"qwen3-0.6b": QWEN_06B, "qwen3-14b": QWEN_14B},
    mixtures=PUBLIC_MIXTURES,
)


@contextmanager
def model_directory(shape: Shape | Mixture, context: int, **more: Any) -> Iterator[Path]:
    """Yield a model of a shape without weights, with the embedded model's tokenizer, which is not used.

    `more` is added to config.json.
    """
    longest = {"max_position_embeddings": context}
    config = shape.config(context) if isinstance(shape, Shape) else {**shape.config, **longest}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        embedded = resolve_model("embedded")
        for file in TOKENIZER_FILES:
            if file not in ("config.json", "generation_config.json") and (embedded / file).is_file():
                shutil.copy(embedded / file, path / file)
        (path / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
        yield path


def random_requests(count: int, inputs: tuple[int, int], outputs: tuple[int, int], vocab: int) -> list[Request]:
    """Return requests of uniformly distributed lengths, the same every time."""
    chance = random.Random(0)
    return [
        ([chance.randrange(vocab) for _ in range(chance.randint(*inputs))], chance.randint(*outputs))
        for _ in range(count)
    ]


def sharing_requests(scale: Scale) -> list[Request]:
    """Return requests. Nine in ten begin with the same `prefix` tokens, the tenth with its own."""
    chance, vocab = random.Random(1), scale.large.vocab
    common = [chance.randrange(vocab) for _ in range(scale.prefix)]
    requests = []
    for number in range(scale.small_requests):
        own = [chance.randrange(vocab) for _ in range(scale.prefix if number % 10 == 0 else 0)]
        requests.append(((own or common) + [chance.randrange(vocab) for _ in range(64)], 32))
    return requests
