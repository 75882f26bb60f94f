"""Inputs per second of an encoder: our core and executor, without padding, against transformers with padding.

The shape is that of all-MiniLM-L6-v2, the weights are random, and the lengths are those of a mixed load: mostly short,
a few long. Both sides run the same inputs alternately, on one thread, so that other load affects them alike.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers

from tercet.protocol.messages.messages import BatchEmbeddingOutput
from tercet.protocol.messages.values import Task, unpack_floats
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.embedding.inputs import TextInputs
from tercet.scheduler.core.embedding.plan import EncoderCapacity
from tercet.scheduler.core.embedding.scheduler import EmbeddingScheduler
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.testing import FakeEncoder, embedding_request

Row = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

INPUTS = 32
"""Inputs of a padded batch: the default of sentence-transformers."""
LONGEST = 256
SHAPE = EncoderCapacity(context_length=LONGEST, vocab_size=30_522, token_types=2, width=384)


def lengths(seed: int) -> list[int]:
    """Return the number of tokens of each input."""
    chance = random.Random(seed)
    return [min(LONGEST, max(4, round(chance.lognormvariate(3.2, 0.9)))) for _ in range(INPUTS)]


def make_model(directory: Path) -> transformers.BertModel:
    """Save a random MiniLM and return transformers' model of it."""
    config = transformers.BertConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(directory)
    return model


def ours(worker: EncoderWorker, inputs: Sequence[list[int]]) -> list[list[float]]:
    """Return vectors computed through the core, as a scheduler does."""
    core = EmbeddingScheduler(CoreConfig(token_budget=512), TextInputs(worker.capacity))
    core.handle(*(Arrival("frontend-0", embedding_request(str(at), ids)) for at, ids in enumerate(inputs)))
    vectors: list[list[float]] = []
    while (plan := core.schedule()) is not None:
        for _, message, *frames in core.commit(worker.submit(plan).result()):
            assert isinstance(message, BatchEmbeddingOutput)
            numbers, width = unpack_floats(frames[0]), message.width
            vectors += [[*numbers[at * width : (at + 1) * width]] for at in range(len(message.rids))]
    return vectors


@torch.inference_mode()
def padded(model: transformers.BertModel, inputs: Sequence[list[int]]) -> torch.Tensor:
    """Return means over tokens of one padded batch."""
    longest = max(map(len, inputs))
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in inputs])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in inputs])
    hidden: torch.Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def core_only(count: int = 2048, rounds: int = 5) -> float:
    """Return the microseconds of the core for one input of 16 tokens, in and out."""
    worker = FakeEncoder(SHAPE)
    times = []
    requests = [Arrival("frontend-0", embedding_request(f"frontend-0-{at:022d}", [1] * 16)) for at in range(count)]
    for _ in range(rounds):
        core = EmbeddingScheduler(CoreConfig(token_budget=512), TextInputs(SHAPE))
        spent = _seconds(partial(core.handle, *requests))
        while True:
            start = time.perf_counter()
            plan = core.schedule()
            spent += time.perf_counter() - start
            if plan is None:
                break
            result = worker.submit(plan).result()
            spent += _seconds(partial(core.commit, result))
        times.append(spent / count)
    return median(times) * 1e6


def rows(rounds: int = 5) -> list[Row]:
    """Return all figures."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        worker = EncoderWorker(EncoderOptions(model=Path(directory), task=Task.EMBED, device="cpu", threads=1))
        mixed: list[tuple[float, float]] = []
        equal: list[tuple[float, float]] = []
        tokens = 0
        for seed in range(rounds):
            counts = lengths(seed)
            for found, inputs in (
                (mixed, [[100 + at] * count for at, count in enumerate(counts)]),
                (equal, [[100 + at] * 32 for at in range(INPUTS)]),
            ):
                near = torch.tensor([list(each) for each in ours(worker, inputs)]) - padded(model, inputs)
                if near.abs().max() > 1e-4:
                    raise AssertionError("both should give the same vectors")
                without = _seconds(partial(ours, worker, inputs))
                found.append((without, _seconds(partial(padded, model, inputs))))
            tokens += sum(counts)
    torch.set_num_threads(threads)
    return [
        ("mixed lengths, inputs/s without padding", INPUTS / median(each for each, _ in mixed), "inputs/s", None),
        ("mixed lengths, inputs/s of transformers", INPUTS / median(each for _, each in mixed), "inputs/s", None),
        ("mixed lengths, times as fast", median(other / each for each, other in mixed), "times", 2.0),
        ("equal lengths, times as fast", median(other / each for each, other in equal), "times", 1.0),
        ("tokens of a mixed input, mean", tokens / rounds / INPUTS, "tokens", None),
        ("the core for one input of 16 tokens, in and out", core_only(), "us", 20.0),
    ]


if __name__ == "__main__":
    for name, measured, unit, target in rows():
        print(f"{name:60} {measured:10.1f} {unit:10} {'' if target is None else f'target {target}'}")
