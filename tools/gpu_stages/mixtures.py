"""Speed of whole mixtures of experts in public shapes, with random weights, in one worker without sockets.

A step's limit counts the experts that so many random choices touch, each once.
"""

from collections.abc import Iterator
from functools import partial

from tools.gpu_stages import executor
from tools.gpu_stages.kernels import ceilings_of
from tools.gpu_stages.processes import gathered
from tools.gpu_stages.scale import Results, Scale, model_directory
from tools.gpu_stages.worker import Offline


def time_mixtures(scale: Scale) -> Iterator[Results]:
    """Yield milliseconds per token of each mixture at its batches, and tokens per second of its prompts."""
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    for found in gathered(partial(_time, scale, copy), scale.mixtures, min(1, scale.processes)):
        yield {"timed": found}


def _time(scale: Scale, copy: float, name: str) -> Iterator[Results]:
    mixture, size = scale.mixtures[name], scale.dtype.itemsize
    slots, decodes = max(mixture.batches), scale.decodes + executor.SETTLING
    yield {"layers": mixture.config["num_hidden_layers"]}
    with model_directory(mixture, scale.context + decodes + 64) as directory:
        offline = Offline(directory, scale, slots=slots, prompt=scale.context, decodes=decodes)
        seconds = min(offline.prefill(slot, scale.context) for slot in range(slots))
        yield {"prefill_tokens_per_s": scale.context / seconds}
        for batch in mixture.batches:
            read = mixture.weight_bytes(batch, size), float(mixture.cached * size)
            yield {f"batch {batch}": executor.decoded(offline, scale, batch, copy, weights=read[0], cached=read[1])}
        offline.worker.close()
