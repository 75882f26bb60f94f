"""Sizes of the measurements, models of those shapes, and requests to them."""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
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
class Scale:
    """Sizes of all measurements: the full ones, or tiny ones for a test of the stages."""

    device: torch.device
    dtype: torch.dtype
    large: Shape
    """Llama-3.1-8B."""
    others: dict[str, Shape]
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
    operation_tokens: int = 16384
    operation_width: int = 4096
    operation_rows: int = 256
    operation_context: int = 4096
    processes: int = 8
    """Processes that check and compile kernels; 0 to use the stage's own process."""


LLAMA_8B = Shape("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128, 128_256)
QWEN_06B = Shape("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True)
QWEN_14B = Shape("Qwen3ForCausalLM", 5120, 17408, 40, 40, 8, 128, 151_936)
FULL = Scale(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    large=LLAMA_8B,
    others={"qwen3-0.6b": QWEN_06B, "qwen3-14b": QWEN_14B},
)


@contextmanager
def model_directory(shape: Shape, context: int, **more: Any) -> Iterator[Path]:
    """Yield a model of a shape without weights, with the embedded model's tokenizer, which is not used.

    `more` is added to config.json.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        embedded = resolve_model("embedded")
        for file in TOKENIZER_FILES:
            if file not in ("config.json", "generation_config.json") and (embedded / file).is_file():
                shutil.copy(embedded / file, path / file)
        (path / "config.json").write_text(json.dumps(shape.config(context) | more), encoding="utf-8")
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
