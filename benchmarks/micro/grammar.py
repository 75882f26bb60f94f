"""Cost of following a grammar at batch 32: whole steps of core and model with and without one, and the masks alone.

Steps are measured alternately, one of each kind, so that other load affects all alike; their processor time is a check
on a busy machine. Masks are given in processor time. The model has random weights and the shape of SmolLM-135M; its
tokenizer is a byte-level BPE trained here on Python's own library. The grammar is a long list of records: free strings,
numbers, and keys that are forced.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.grammar.llguidance import LLGuidanceBackend
from tercet.scheduler.testing import request

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

BATCH = 32
STEPS = 24
VOCAB = 49152
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": VOCAB,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2999},
        "kind": {"enum": ["novel", "poem", "essay"]},
        "reviews": {"type": "array", "items": {"type": "string", "maxLength": 200}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "year", "kind", "reviews"],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": RECORD, "minItems": 500, "x-guidance": {"whitespace_flexible": False}}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(RECORDS))


def write_model(folder: Path) -> None:
    """Write a config and a tokenizer with a real trie of tokens."""
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 100,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    tokenizer.train([str(path) for path in sources], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


class Serving:
    """Worker and core that decode BATCH requests, one step per call."""

    def __init__(self, options: WorkerOptions, grammar: Grammar | None) -> None:
        self._worker = TpModelWorker(options)
        self._core = Scheduler(CoreConfig(token_budget=4096, reserve=0.0, reserve_floor=0.0), self._worker.capacity)
        params: dict[str, Any] = {"max_new_tokens": 1500, "temperature": 1.0, "ignore_eos": True, "grammar": grammar}
        for number in range(BATCH):
            wanted = request(f"r{number}", [number + 1, *range(300, 332)], seed=number, **params)
            self._core.handle(Arrival("frontend-0", wanted))
        for _ in range(4):
            self.step()
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.tokens: list[int] = []

    def measured_step(self) -> None:
        """Run a step and record its time."""
        before = self._core.counters.output_tokens
        wall, processor = time.perf_counter(), time.process_time()
        self.step()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)
        self.tokens.append(self._core.counters.output_tokens - before)

    def step(self) -> None:
        """Plan, run and commit a step."""
        plan = self._core.schedule()
        if plan is None or len(plan.rows) != BATCH:
            raise AssertionError("every request should be in every step")
        self._core.commit(self._worker.submit(plan).result())

    def close(self) -> None:
        """End the threads."""
        self._worker.close()


def served(folder: Path) -> Iterator[Measured]:
    """Yield whole steps, and tokens per second when forced tokens need no step."""
    options = WorkerOptions(
        model=folder, load_format="dummy", device="cpu", slots=BATCH, context_length=2048, kv_cache_bytes=1 << 30
    )
    plain = Serving(options, None)
    stepwise = Serving(replace(options, fast_forward=False), GRAMMAR)
    forward = Serving(options, GRAMMAR)
    for _ in range(STEPS):
        for each in (plain, stepwise, forward):
            each.measured_step()
    for each in (plain, stepwise, forward):
        each.close()
    gained = sum(forward.tokens) / sum(plain.tokens)
    yield f"a step of {BATCH} without grammars", median(plain.wall) * 1e3, "ms", None
    yield "a step with grammars / without", median(stepwise.wall) / median(plain.wall), "x", 1.1
    yield "the same in processor time", median(stepwise.processor) / median(plain.processor), "x", 1.1
    yield "tokens of a step with fast-forward / without", gained, "x", None
    yield "throughput with fast-forward / without grammars", gained * sum(plain.wall) / sum(forward.wall), "x", 0.9


def masks(folder: Path) -> Iterator[Measured]:
    """Yield the processor time of one row's mask and of its next token, for outputs that continue at random."""
    backend = LLGuidanceBackend((folder / "tokenizer.json").read_text(encoding="utf-8"), VOCAB, [0])
    start = time.process_time()
    matchers = [backend.compile(GRAMMAR)]
    compiled = time.process_time() - start
    matchers += [matchers[0].copy() for _ in range(BATCH - 1)]
    chance = torch.Generator().manual_seed(0)
    words = torch.zeros(BATCH, VOCAB // 32, dtype=torch.int32)
    bits = torch.arange(32, dtype=torch.int32)
    filled = advanced = 0.0
    steps = 40
    for _ in range(steps):
        start = time.process_time()
        backend.fill(matchers, words.numpy())
        filled += time.process_time() - start
        allowed = (words[:, :, None] >> bits & 1).flatten(1).float()
        tokens = torch.multinomial(allowed, 1, generator=chance)[:, 0].tolist()
        start = time.process_time()
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.advance([token])
            matcher.forced()
        advanced += time.process_time() - start
    yield "compile a schema", compiled * 1e3, "ms", None
    yield "one mask, mean", filled / steps / BATCH * 1e6, "us", None
    yield "see one token, and what it forces, mean", advanced / steps / BATCH * 1e6, "us", None


def rows() -> Iterator[Measured]:
    """Yield all figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        yield from masks(folder)
        with torch.inference_mode():
            yield from served(folder)


if __name__ == "__main__":
    for what, measured, unit, target in rows():
        sys.stdout.write(f"{what:62} {measured:12.3f} {unit:8} target {target}\n")
        sys.stdout.flush()
