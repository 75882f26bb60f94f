"""Tiny shapes for tests of GPU check stages, on the CPU in Triton's interpreter."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tercet.scheduler.testing.quantized_checkpoints import Grain
from tools.gpu_stages.scale import PUBLIC_MIXTURES, Mixture, Request, Results, Scale, Shape

CPU = torch.device("cpu")
SHAPE = Shape("LlamaForCausalLM", 64, 96, 1, 2, 1, 32, 128)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "dtype": "float32",
}


def small(mixture: Mixture) -> Mixture:
    """Return a mixture with small values of the fields that its config has."""
    config = {**mixture.config, **{name: value for name, value in SMALL.items() if name in mixture.config}}
    return dataclasses.replace(mixture, config=config, batches=(1, 2), experts=8)


TINY = Scale(
    device=CPU,
    dtype=torch.float32,
    large=SHAPE,
    others={"qwen3-0.6b": Shape("Qwen3ForCausalLM", 64, 96, 1, 2, 1, 32, 128, tied=True)},
    mixtures={name: small(mixture) for name, mixture in PUBLIC_MIXTURES.items() if "120b" not in name},
    batches=(1, 2),
    context=16,
    served_context=256,
    prompt=32,
    launched=(8, 16),
    decodes=4,
    traced=3,
    requests=3,
    longest_input=6,
    longest_output=4,
    sample=2,
    sample_output=3,
    small_requests=11,
    small_lengths=(1, 4),
    prefix=8,
    compared=Shape("LlamaForCausalLM", 64, 96, 2, 2, 1, 32, 128),
    grain=Grain(group=32, block=(16, 32)),
    compared_tokens=32,
    quantised_batches=(1, 2),
    draft_rows=4,
    draft_batches=(1, 2),
    draft_counts=(1, 2),
    tiled_rows=(2,),
    torch_rows=(2, 32),
    way_rows=(2, 32),
    expert_tokens=(2,),
    weights_at_once=1,
    operation_tokens=16,
    operation_width=64,
    operation_rows=2,
    operation_context=8,
    processes=0,
)


class Engine:
    """Fake engine that answers each request with its maximum number of tokens."""

    def generate(self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert all(ids and max(ids) < SHAPE.vocab for ids in input_ids)
        return [{"output_ids": [1] * params["max_new_tokens"]} for params in sampling_params]


@contextmanager
def make_engine(model: str, **options: Any) -> Iterator[Engine]:
    config = json.loads((Path(model) / "config.json").read_text())
    assert options["load_format"] == "dummy"
    assert config["vocab_size"] == SHAPE.vocab
    yield Engine()


def peer(directory: Path, scale: Scale, requests: Sequence[Request]) -> Results:
    assert (directory / "config.json").exists()
    return {"output_tokens_per_s": 0.5, "requests": len(requests)}


def failing(*_: object) -> Any:
    """Raise the error of a device after an illegal memory access."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
