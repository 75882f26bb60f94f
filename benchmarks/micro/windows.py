"""Tokens that fit into 24 GB of keys and values, with and without pages of windows that are freed early.

A count, not a time: the sizes that a scheduler with 32 slots, steps of 4,096 tokens and contexts of 32,768 tokens
chooses at start. Beside them stands the field's arithmetic: contexts whose layers with a window keep that window alone.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from packages.scheduler.tests.executor.test_kv_budget import GEMMA3_27B, GPT_OSS_20B
from tercet.kernels.ops import sampler_ops
from tercet.scheduler.executor.kv_budget import KVBudget, kv_shapes
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import WHOLE
from tercet.scheduler.models.registry import load_config

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

BYTES, CONTEXT, PAGE_SIZE = 24 * 10**9, 32_768, 16
SHAPES = {"Gemma 3 27B": GEMMA3_27B, "gpt-oss-20b": GPT_OSS_20B}


def tokens_of(name: str, fields: Mapping[str, Any]) -> Iterator[Measured]:
    """Yield the tokens of one model's shape."""
    with tempfile.TemporaryDirectory() as folder:
        served = {**fields, "dtype": "bfloat16", "max_position_embeddings": CONTEXT}
        (Path(folder) / "config.json").write_text(json.dumps(served))
        options = WorkerOptions(
            model=Path(folder), page_size=PAGE_SIZE, slots=32, step_tokens=4096, kv_cache_bytes=BYTES
        )
        config = load_config(Path(folder))
        budget = KVBudget(options, config, kv_shapes(options, config, WHOLE), torch.device("cpu"), WHOLE)
        sizes = budget.sizes(None, None, sampler_ops)  # type: ignore[arg-type]
    each = {layer: shape.page_bytes // PAGE_SIZE for layer, shape in budget.shapes.items()}
    equal = BYTES // (sum(each.values()) * PAGE_SIZE) * PAGE_SIZE
    context = sum(size * (config.window_of(layer) or CONTEXT) for layer, size in each.items())
    yield f"{name}: tokens with equal groups", equal, "tokens", None
    yield f"{name}: tokens where windows are freed", sizes.pages * PAGE_SIZE, "tokens", None
    yield f"{name}: the same, over equal groups", sizes.pages * PAGE_SIZE / equal, "x", None
    yield f"{name}: arithmetic of whole contexts and their windows", BYTES / context * CONTEXT, "tokens", None


def rows() -> Iterator[Measured]:
    """Yield the tokens of each shape."""
    for name, fields in SHAPES.items():
        yield from tokens_of(name, fields)
