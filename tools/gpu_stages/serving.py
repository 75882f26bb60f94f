"""Performance of Tercet without HTTP, and of transformers for comparison."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from tools.gpu_stages.scale import Request, Results, Scale, Shape, model_directory, random_requests, sharing_requests

MakeEngine = Callable[..., AbstractContextManager[Any]]
"""`tercet.frontend.engine.engine.Engine`, or a substitute."""

Peer = Callable[[Path, Scale, Sequence[Request]], Results]
"""Another engine, which answers requests to the random model of a directory."""

_KERNEL_CACHE = "TRITON_CACHE_DIR"
"""Environment variable of Triton's folder of compiled kernels."""

_OPTIONS: dict[str, Any] = {"max_running_requests": 256, "chunked_prefill_size": 8192}


def served(
    make_engine: MakeEngine, shape: Shape, requests: Sequence[Request], *, again: bool = False, **options: Any
) -> Results:
    """Run all requests at once. With `again`, other prompts run before, which compile kernels and record graphs."""
    longest = max(len(ids) + output for ids, output in requests)
    with model_directory(shape, longest + 8) as directory:
        start = time.perf_counter()
        with make_engine(str(directory), load_format="dummy", **_OPTIONS | options) as engine:
            ready = time.perf_counter() - start
            engine.generate(input_ids=[requests[0][0][:8]], sampling_params=[_sampling(2)])  # the first is slower
            others = [([*reversed(ids)], output) for ids, output in requests]
            first = {"first_load_s": _load(engine, others)[0]} if again else {}
            return {"ready_s": ready, **first, **_speed(*_load(engine, requests))}


def _load(engine: Any, requests: Sequence[Request]) -> tuple[float, int]:
    """Return (seconds until the last answer, tokens of all answers)."""
    start = time.perf_counter()
    answers = engine.generate(
        input_ids=[ids for ids, _ in requests], sampling_params=[_sampling(output) for _, output in requests]
    )
    return time.perf_counter() - start, sum(len(answer["output_ids"]) for answer in answers)


def _sampling(output: int) -> dict[str, Any]:
    return {"max_new_tokens": output, "ignore_eos": True, "temperature": 0.0}


def _speed(seconds: float, tokens: int) -> Results:
    return {"seconds": seconds, "output_tokens": tokens, "output_tokens_per_s": tokens / seconds}


def offline(scale: Scale, make_engine: MakeEngine) -> Iterator[Results]:
    """Yield requests of random lengths without a shared prefix."""
    lengths = (1, scale.longest_input), (1, scale.longest_output)
    requests = random_requests(scale.requests, *lengths, scale.large.vocab)
    yield served(make_engine, scale.large, requests, max_running_requests=scale.running)


def small_models(scale: Scale, make_engine: MakeEngine) -> Iterator[Results]:
    """Yield mini-sglang's offline benchmark, with its shapes."""
    for name, shape in scale.others.items():
        lengths = scale.small_lengths, scale.small_lengths
        requests = random_requests(scale.small_requests, *lengths, shape.vocab)
        yield {name: served(make_engine, shape, requests, again=True)}


def shared_prefix(scale: Scale, make_engine: MakeEngine) -> Iterator[Results]:
    """Yield results with the prefix cache and without it; nine in ten requests have the same prefix."""
    requests = sharing_requests(scale)
    cached = served(make_engine, scale.large, requests)
    yield {"cached": cached}
    plain = served(make_engine, scale.large, requests, disable_radix_cache=True)
    yield {"plain": plain, "ratio": plain["seconds"] / cached["seconds"]}


def ready(scale: Scale, make_engine: MakeEngine) -> Iterator[Results]:
    """Yield seconds from start to ready of the large random model, before Triton has compiled and after.

    FlashInfer's kernels and the system's file cache are warm both times if they were before.
    """
    with _empty_kernel_cache():
        for name in ("uncompiled", "warm"):
            with model_directory(scale.large, 4096) as directory:
                start = time.perf_counter()
                with make_engine(str(directory), load_format="dummy", **_OPTIONS):
                    yield {f"{name}_s": time.perf_counter() - start}


@contextmanager
def _empty_kernel_cache() -> Iterator[None]:
    """Let processes started inside find only the kernels that they have compiled themselves."""
    before = os.environ.get(_KERNEL_CACHE)
    with tempfile.TemporaryDirectory() as directory:
        os.environ[_KERNEL_CACHE] = directory
        try:
            yield
        finally:
            os.environ.pop(_KERNEL_CACHE)
            if before is not None:
                os.environ[_KERNEL_CACHE] = before


def against_transformers(scale: Scale, make_engine: MakeEngine, peer: Peer | None = None) -> Iterator[Results]:
    """Yield the same requests here and in transformers' continuous batching; every answer has one length."""
    shape, output = scale.large, scale.sample_output
    requests = random_requests(scale.sample, (1, scale.longest_input), (output, output), shape.vocab)
    ours = served(make_engine, shape, requests)
    yield {"tercet": ours}
    with model_directory(shape, scale.longest_input + output + 8) as directory:
        theirs = (peer or continuous_batching)(directory, scale, requests)
    yield {"transformers": theirs, "ratio": ours["output_tokens_per_s"] / theirs["output_tokens_per_s"]}


def continuous_batching(directory: Path, scale: Scale, requests: Sequence[Request]) -> Results:
    """Return the result of transformers' continuous batching with its default options."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    output = requests[0][1]
    with scale.device:
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config, dtype=scale.dtype).eval()
    greedy = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch([requests[0][0][:8]], generation_config=greedy)  # compiles, and allocates memory
    start = time.perf_counter()
    answers = model.generate_batch([ids for ids, _ in requests], generation_config=greedy)
    seconds = time.perf_counter() - start
    errors = [answer.error for answer in answers.values() if answer.error]
    if errors or len(answers) != len(requests):
        raise RuntimeError(f"transformers answered {len(answers)} of {len(requests)} requests: {errors[:1]}")
    del model
    torch.cuda.empty_cache()
    return _speed(seconds, sum(len(answer.generated_tokens) for answer in answers.values()))
