"""Cost of rounding: a model's perplexity in each number format, on the same text.

python -m tools.perplexity [MODEL] [--text FILE ...] [--tokens 4096]: by default the embedded model, on conversations of
the kind that it was trained on. Native kernels; prints each perplexity with that of bfloat16.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tercet.kernels.native.linear import Quantization
from tercet.protocol.messages.values import SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import resolve_model
from tools.demo_model.corpus import write_corpus

PAGE_SIZE, WINDOW = 16, 256
SEED = 20_261
"""Seed of conversations that the model was not trained on."""
FORMATS: dict[str, tuple[str, Quantization]] = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
"""Dtype of a model, and format that its weights are rounded to."""


def perplexity(model: Path, windows: Sequence[Sequence[int]], name: str) -> float:
    """Return the perplexity of all windows' tokens but the first, given those before."""
    dtype, quantization = FORMATS[name]
    options = WorkerOptions(
        model=model,
        dtype=dtype,
        device="cpu",
        attention_backend="cpu",
        quantization=quantization,
        slots=1,
        page_size=PAGE_SIZE,
        context_length=WINDOW,
        kv_cache_bytes=1 << 26,
    )
    worker = TpModelWorker(options)
    total, count = 0.0, 0
    for step, window in enumerate(windows):
        logprobs = unpack_floats(worker.submit(_scoring(step, window)).result().prompt_logprobs[0].chosen)
        total, count = total + math.fsum(logprobs), count + len(logprobs)
    return math.exp(-total / count)


def _scoring(step: int, tokens: Sequence[int]) -> Plan:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    init = SlotInit(
        slot=0,
        tokens=pack_ints(tokens),
        prompt_tokens=len(tokens),
        choice=0,
        sampling=sampling,
        top_logprobs=0,
        prompt_logprobs=True,
    )
    pages = PageUpdate(0, 0, [list(range(WINDOW // PAGE_SIZE))])
    return Plan(step=step, introduce=[init], pages=[pages], rows=[Row(0, 0, len(tokens), sample=False)])


def conversations(model: Path, count: int) -> Iterator[str]:
    """Yield conversations about this project that the embedded model was not trained on, in its chat template."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((model / "chat_template.jinja").read_text(encoding="utf-8"))
    for conversation in write_corpus(count, seed=SEED):
        yield conversation.text or template.render(messages=conversation.messages, tools=conversation.tools)


def windows_of(model: Path, texts: Iterable[str], most: int) -> list[list[int]]:
    """Return texts as tokens, each cut into windows, until there are `most` tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    windows: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows += [ids[first : first + WINDOW] for first in range(0, len(ids) - 1, WINDOW)]
        if sum(map(len, windows)) >= most:
            break
    return windows


def main(arguments: list[str]) -> int:
    """Print a line for each number format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded", help="a directory, a Hugging Face name, or embedded")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args(arguments)
    model = resolve_model(options.model)
    files = (path.read_text(encoding="utf-8") for path in options.text)
    windows = windows_of(model, files if options.text else conversations(model, options.tokens // 16), options.tokens)
    found = {name: perplexity(model, windows, name) for name in FORMATS}
    print(f"{model.name}, {sum(map(len, windows))} tokens")
    for name, value in found.items():
        print(f"{name:9} {value:12.4f} {value / found['bfloat16'] - 1:+8.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
