"""Survey of transformers' generative model types: the result of Tercet with a small random model of each.

`python -m tools.survey_fallback [TYPE ...]` prints one line per type:
- `native`: it runs on Tercet's own modules;
- `right`: in chunks, past the window and beside another text, tokens and log-probabilities are those of a plain forward
  of transformers;
- `refused`, with the reason;
- `unbuilt`: no small model of it can be built here, with the reason;
- WRONG: anything else. The status is 1 if there is any.

Each type runs in a process of its own with bounded memory and time.
"""

import argparse
import json
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from packages.scheduler.tests.models.test_hugging_face import expected, generate, options
from tercet.scheduler.architectures import is_ours
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tools.tiny_configs import UnbuiltError, tiny_config

_MEMORY = 8 * 2**30
_SECONDS = 90
_LARGEST = 60_000_000
"""Parameters of a small model."""
_STEPS = 8
_NEAR = 1e-3
"""Difference of float32 log-probabilities above which it is not rounding."""


class Verdict(NamedTuple):
    """Result of one model type."""

    kind: str
    line: str = ""


def model_types() -> dict[str, tuple[str, ...]]:
    """Return model types and the classes that generate text with them."""
    found: dict[str, tuple[str, ...]] = {}
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, classes in names.items():
            found.setdefault(model_type, (classes,) if isinstance(classes, str) else tuple(classes))
    return {model_type: found[model_type] for model_type in sorted(found) if model_type in CONFIG_MAPPING}


def save_tiny(model_type: str, architecture: str, directory: Path) -> None:
    """Write a random checkpoint of a small model. Raises UnbuiltError if none can be built."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(model_type.encode()))
        kind = getattr(transformers, architecture)
        try:
            config = tiny_config(model_type)
            with torch.device("meta"):
                size = kind(config).num_parameters()
            if size > _LARGEST:
                raise UnbuiltError(f"{size} parameters are too many")
            model = kind(tiny_config(model_type))
        except Exception as error:
            raise UnbuiltError(f"{type(error).__name__}: {error}") from error
        for parameter in model.parameters():
            values = parameter.detach()
            spread = float(values.float().std()) if values.numel() > 1 else 0.0
            if spread == 0.0:  # norms and biases of ones and zeros would hide faults
                values.add_(torch.randn_like(values) * 0.2)
            elif values.ndim > 1 and spread < 0.05:
                values.mul_(0.15 / spread)
    model.eval().save_pretrained(directory)


def judge(model_type: str, architecture: str) -> Verdict:
    """Return the result of Tercet with a model type."""
    if is_ours(architecture):
        return Verdict("native")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            save_tiny(model_type, architecture, directory)
            wanted = expected(directory, _STEPS)
        except Exception as error:
            return Verdict("unbuilt", " ".join(f"{type(error).__name__}: {error}".split()))
        try:
            worker = TpModelWorker(options(directory))
        except ValueError as error:
            return Verdict("refused" if "\n" not in str(error) else "WRONG", str(error))
        actual = generate(worker, _STEPS)
        worker.close()
    return compared(actual, wanted)


def compared(actual: list[list[tuple[int, float]]], wanted: list[list[tuple[int, float]]]) -> Verdict:
    """Return `right` if tokens are equal and log-probabilities nearly so."""
    apart = 0.0
    for ours, theirs in zip(actual, wanted, strict=True):
        for step, ((token, score), (other, right)) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(score - right) < _NEAR:
                return Verdict("WRONG", f"log-probability {score:.4f} instead of {right:.4f} at token {step}")
            apart = max(apart, abs(score - right))
            if token != other:
                break  # two equally likely tokens
    return Verdict("right", f"within {apart:.0e}")


def survey(wanted: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Verdict]]:
    """Yield each type's result, each from a process of its own."""
    for model_type, classes in wanted.items():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run_apart(model_type, classes[0], writing)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        yield model_type, Verdict(*json.loads(text)) if text else Verdict("WRONG", f"died with status {status}")


def _stop(*_: object) -> None:
    raise TimeoutError(f"it takes longer than {_SECONDS} s")


def _run_apart(model_type: str, architecture: str, writing: int) -> None:
    """Run a type and exit the process."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(_SECONDS)
    try:
        verdict = judge(model_type, architecture)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        verdict = Verdict("WRONG", f"traceback: {type(error).__name__}: {error} ({where.filename}:{where.lineno})")
    os.write(writing, json.dumps(verdict).encode()[:60_000])
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    types = parser.parse_args().types
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    judge("starcoder2", "Starcoder2ForCausalLM")  # imports here are shared by all forked processes
    everything = model_types()
    counts: Counter[str] = Counter()
    for model_type, verdict in survey({each: everything[each] for each in types or everything}):
        counts[verdict.kind] += 1
        print(f"{model_type:28} {verdict.kind:8} {verdict.line[:300]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
