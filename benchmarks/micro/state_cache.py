"""Prefix cache of models with recurrent states, their kernels, and a hybrid model beside transformers.

The workloads run on the core over a fake executor. Kernels and models use native libraries on all cores that this
process may use; kernels stand beside a plain read of memory and a matrix product in float32 of the same run.
"""

import random
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.micro.cpu import Measured, best_of, ceiling
from tercet.kernels.native.library import available_cores, load_library
from tercet.kernels.native.recurrent import NativeRecurrence
from tercet.kernels.ops.recurrent import DeltaInputs, ScanInputs, Segment, Segments, SelectiveInputs
from tercet.protocol.messages.messages import BatchTokenIDOutput, TokenizedGenerateReqInput
from tercet.protocol.messages.values import SamplingParams, pack_ints, unpack_ints
from tercet.scheduler.core.cache.state_cache import StateRadixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit, StateRestore, StateSnapshot
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig
from tercet.scheduler.testing import FakeExecutor, request, small_capacity

CPU = torch.device("cpu")
PAGE_SIZE, VOCABULARY = 16, 50_000
PREFIX, OWN, ANSWER = 2000, 300, 64
"""Tokens that 64 prompts share, that each has of its own, and of an answer."""
TURN, TURNS, CHATS = 40, 6, 64
NET = DeltaNetConfig(
    layers=frozenset(range(18)), key_heads=16, heads=32, key_dim=128, value_dim=128, taps=4, norm_eps=1e-6
)
"""The Gated DeltaNet layers of Qwen3.5-35B-A3B; 18 of its 30."""


class Workload:
    """A core over a fake executor, with pages and snapshots for every request."""

    def __init__(self) -> None:
        capacity = small_capacity(
            pages=20_000, page_size=PAGE_SIZE, slots=64, context_length=8192, vocab_size=VOCABULARY, snapshots=1000
        )
        self.core = Scheduler(CoreConfig(token_budget=2048), capacity)
        self.executor = FakeExecutor(capacity)
        self.chance = random.Random(0)
        self.served = 0

    def tokens(self, count: int) -> list[int]:
        """Return random tokens."""
        return [self.chance.randrange(1, VOCABULARY) for _ in range(count)]

    def serve(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
        """Return the cached tokens and the answer of each prompt; all arrive together."""
        rids = [f"frontend-0-{self.served + number:022d}" for number in range(len(prompts))]
        self.served += len(prompts)
        asked: list[TokenizedGenerateReqInput] = [
            request(rid, prompt, max_new_tokens=ANSWER, ignore_eos=True)
            for rid, prompt in zip(rids, prompts, strict=True)
        ]
        self.core.handle(*(Arrival("frontend-0", each) for each in asked))
        cached: dict[str, int] = {}
        answers: dict[str, list[int]] = {rid: [] for rid in rids}
        while plan := self.core.schedule():
            for _, message, *_ in self.core.commit(self.executor.submit(plan).result()):
                if isinstance(message, BatchTokenIDOutput):
                    ids, offsets = unpack_ints(message.token_ids), unpack_ints(message.offsets)
                    for row, rid in enumerate(message.rids):
                        answers[rid] += ids[offsets[row] : offsets[row + 1]]
                    cached |= {message.rids[opening.row]: opening.cached_tokens for opening in message.openings}
        return [cached[rid] for rid in rids], [answers[rid] for rid in rids]


def shared_prefixes() -> Iterator[Measured]:
    """Yield the hits of 64 prompts that share a prefix and differ after it."""
    work = Workload()
    shared = work.tokens(PREFIX)
    cached, _ = work.serve([[*shared, *work.tokens(OWN)] for _ in range(64)])
    yield from hits("64 prompts together", cached, PREFIX + OWN, 63)  # one computes what they share
    work = Workload()
    shared = work.tokens(PREFIX)
    for _ in range(2):  # the first has its only snapshot at its end; the second leaves one where it parts
        work.serve([[*shared, *work.tokens(OWN)]])
    cached = [work.serve([[*shared, *work.tokens(OWN)]])[0][0] for _ in range(64)]
    yield from hits("64 prompts one after another, after two others", cached, PREFIX + OWN, 64)


def hits(name: str, cached: Sequence[int], length: int, target: float) -> Iterator[Measured]:
    """Yield the prompts with cached tokens, and the tokens computed per prompt."""
    computed = sum(length - each for each in cached) / len(cached)
    yield f"{name}: hits", sum(each > 0 for each in cached), "prompts", target
    yield f"{name}: computed of {length} tokens each", computed, "tokens", None


def chats() -> Iterator[Measured]:
    """Yield the hits of 64 chats, and the tokens of earlier turns that each turn computes again."""
    work = Workload()
    histories = [work.tokens(500) for _ in range(CHATS)]
    _, answers = work.serve(histories)
    again: list[float] = []
    fewest, whole = CHATS, 0
    for _ in range(TURNS):
        histories = [[*old, *answer, *work.tokens(TURN)] for old, answer in zip(histories, answers, strict=True)]
        cached, answers = work.serve(histories)
        fewest = min(fewest, sum(each > 0 for each in cached))
        again += [len(history) - TURN - each for history, each in zip(histories, cached, strict=True)]
        whole += sum(map(len, histories))
    yield f"{CHATS} chats, {TURNS} more turns each: hits, fewest of a turn", fewest, "chats", 64.0
    name = f"{CHATS} chats: computed per turn"
    yield f"{name}, beside the {TURN} new tokens", sum(again) / len(again), "tokens", None
    yield f"{name} without a cache", whole / len(again), "tokens", None


def tree() -> Iterator[Measured]:
    """Yield the time of the core's operations on snapshots, over a tree of 1,000 prompts of 1,024 tokens."""
    cache = StateRadixCache(PAGE_SIZE, 1, lambda _: None)
    keys = [array("i", [number, *range(1, 1024)]).tobytes() for number in range(1000)]
    for key in keys:
        cache.insert("", key, [list(range(1024 // PAGE_SIZE))])

    def timed(call: Callable[[int], object]) -> float:
        times = []
        for number in range(len(keys)):
            start = time.perf_counter()
            call(number)
            times.append(time.perf_counter() - start)
        return median(times) * 1e6

    half = 512 * array("i").itemsize
    yield "core: snapshot in the middle of an edge", timed(lambda n: cache.attach("", keys[n][:half], n)), "us", None
    yield "core: match up to a snapshot", timed(lambda n: cache.match("", keys[n])), "us", None
    yield "core: give up a snapshot", timed(lambda _: cache.evict_snapshot()), "us", None


def copies(most: float) -> Iterator[Measured]:
    """Yield the rate at which states of slots are copied, counted as bytes read and written."""
    pool = StatePool(dict.fromkeys(sorted(NET.layers), NET.state_tensors(torch.bfloat16)), 4, 4, CPU)
    size = pool.bytes / 8
    rows = [Row(slot, 64, 1, sample=True) for slot in range(4)]
    take = Plan(step=0, rows=rows, snapshots=[StateSnapshot(row, 0, row) for row in range(4)])
    give = Plan(step=0, rows=rows, restores=[StateRestore(slot, slot) for slot in range(4)])
    seconds = best_of({"snapshot": lambda: pool.begin(take), "restore": lambda: pool.begin(give)})
    for name, each in seconds.items():
        yield f"pool: {name} of 4 states of {size / 1e6:.0f} MB", 2 * 4 * size / each / 1e9, "GB/s", 0.7 * most
        yield f"pool: {name}, one state", each / 4 * 1e3, "ms", None


def kernels(most: float) -> Iterator[Measured]:
    """Yield the rates of native kernels: bytes of states at decode, arithmetic at prefill."""
    native = NativeRecurrence(load_library())
    heads, size = NET.heads, NET.key_dim
    states = torch.randn(33, heads, size, size)
    square = torch.randn(1024, 1024)
    peak = 2 * 1024**3 / best_of({"product": lambda: square @ square})["product"] / 1e9
    yield "a product of 1,024 x 1,024 matrices in float32", peak, "GFLOP/s", None
    for tokens, segments in (
        (32, Segments(torch.arange(32), [])),
        (512, Segments(torch.empty(0, dtype=torch.int64), [Segment(0, 512, 0)])),
    ):
        q, k, v = torch.randn(3, tokens, heads, size).unbind()
        decay, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
        calls: dict[str, Callable[[], object]] = {
            "gated delta rule": partial(native.gated_delta_rule, DeltaInputs(q, k, v, decay, beta), states, segments),
            "the same, decay by channel": partial(
                native.gated_delta_rule, DeltaInputs(q, k, v, -torch.rand_like(k), beta), states, segments
            ),
            "state space scan": partial(native.state_space_scan, ScanInputs(q, k, v, decay), states, segments),
        }
        for name, seconds in best_of(calls).items():
            arithmetic = (5 if name == "state space scan" else 7) * tokens * heads * size * size
            if tokens == 32:
                moved = 2 * states[:32].nbytes
                yield f"{name}, 32 decodes: states read and written", moved / seconds / 1e9, "GB/s", 0.5 * most
            yield f"{name}, {tokens} tokens", arithmetic / seconds / 1e9, "GFLOP/s", None
    yield from draft_tokens(native, states)
    yield from selective(native, most)


def selective(native: NativeRecurrence, most: float) -> Iterator[Measured]:
    """Yield the rates of Mamba 1's scan in a layer of Falcon-Mamba 7B."""
    channels, size = 8192, 16
    states, rates = torch.randn(33, channels, size), -torch.rand(channels, size)
    for tokens, segments in (
        (32, Segments(torch.arange(32), [])),
        (256, Segments(torch.empty(0, dtype=torch.int64), [Segment(0, 256, 0)])),
    ):
        c, b = torch.randn(2, tokens, size)
        inputs = SelectiveInputs(c, b, torch.randn(tokens, channels), torch.rand(tokens, channels), rates)
        seconds = best_of({"scan": partial(native.selective_scan, inputs, states, segments)})["scan"]
        if tokens == 32:
            moved = 2 * states[:32].nbytes
            yield "selective scan, 32 decodes: states read and written", moved / seconds / 1e9, "GB/s", 0.5 * most
        arithmetic = 6 * tokens * channels * size
        yield f"selective scan, {tokens} tokens, without exponentials", arithmetic / seconds / 1e9, "GFLOP/s", None


def draft_tokens(native: NativeRecurrence, states: torch.Tensor) -> Iterator[Measured]:
    """Yield the time of a decode with four draft tokens in one layer, with and without snapshots to undo them."""
    q, k, v = torch.randn(3, 5, *states.shape[1:3]).unbind()
    inputs = DeltaInputs(q, k, v, -torch.rand(5, len(q[0])), torch.rand(5, len(q[0])))
    singles, tokens = torch.zeros(1, dtype=torch.int64), range(1, 5)
    undone = [Segment(token, token + 1, 0, token + 1 if token < 4 else -1) for token in tokens]
    seconds = best_of(
        {
            "4 draft tokens in a layer": partial(
                native.gated_delta_rule, inputs, states, Segments(singles, [Segment(1, 5, 0)])
            ),
            "the same, with a snapshot after each": partial(
                native.gated_delta_rule, inputs, states, Segments(singles, undone, [(0, 1)])
            ),
        }
    )
    for name, each in seconds.items():
        yield name, each * 1e6, "us", None


SHAPE: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
"""A Qwen3.5 of the size of SmolLM-135M."""
PROMPT = 256


class Ours:
    """A worker that has computed a prompt for each of several slots."""

    def __init__(self, folder: Path, batch: int) -> None:
        options = WorkerOptions(
            model=folder, load_format="dummy", device="cpu", slots=batch, context_length=1024, kv_cache_bytes=1 << 29
        )
        self.worker = TpModelWorker(options)
        self.threads = torch.get_num_threads()  # as the worker has set them
        self.batch, self.length, self.number = batch, PROMPT, 0
        for slot in range(batch):
            self.prefill(slot)

    def prefill(self, slot: int = 0) -> None:
        """Compute a prompt."""
        pages = 1024 // self.worker.capacity.page_size
        init = SlotInit(
            slot=slot,
            tokens=pack_ints((7 * slot + place) % 1000 for place in range(PROMPT)),
            prompt_tokens=PROMPT,
            choice=0,
            sampling=SamplingParams(max_new_tokens=700, temperature=0.0),
        )
        update = PageUpdate(slot, 0, [list(range(slot * pages, slot * pages + pages))])
        torch.set_num_threads(self.threads)
        self._run(introduce=[init], pages=[update], rows=[Row(slot, 0, PROMPT, sample=True)])

    def decode(self) -> None:
        """Decode a token in each slot."""
        torch.set_num_threads(self.threads)
        self._run(rows=[Row(slot, self.length, 1, sample=True) for slot in range(self.batch)])
        self.length += 1

    def _run(self, **plan: Any) -> None:
        self.worker.submit(Plan(step=self.number, **plan)).result()
        self.number += 1


class Theirs:
    """The same model in transformers, in the state after a prompt."""

    def __init__(self, folder: Path, batch: int, dtype: torch.dtype) -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.cache: Any = transformers.DynamicCache(config=config)
        self.ids = torch.arange(PROMPT)[None].expand(batch, -1) % 1000
        self.last = self.prefill(self.cache)

    def prefill(self, cache: Any = None) -> torch.Tensor:
        """Compute the prompts, and return each one's next token."""
        logits = self.model(self.ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        chosen: torch.Tensor = logits.argmax(-1)
        return chosen

    def decode(self) -> None:
        """Decode a token of each text."""
        logits = self.model(self.last, past_key_values=self.cache, use_cache=True).logits
        self.last = logits.argmax(-1)


def models() -> Iterator[Measured]:
    """Yield tokens a second of a hybrid model in bfloat16, and the ratio to transformers' faster dtype."""
    import transformers

    with tempfile.TemporaryDirectory() as name:
        config = transformers.Qwen3_5TextConfig(**SHAPE, dtype="bfloat16", architectures=["Qwen3_5ForCausalLM"])
        config.save_pretrained(name)
        for batch in (1, 8):
            torch.set_num_threads(available_cores())
            ours = Ours(Path(name), batch)
            theirs = {dtype: Theirs(Path(name), batch, dtype) for dtype in (torch.bfloat16, torch.float32)}
            if batch == 1:
                weights = sum(parameter.numel() for parameter in theirs[torch.float32].model.parameters())
                yield "hybrid model: parameters", weights / 1e6, "million", None
                calls: dict[str, Callable[[], object]] = {"ours": ours.prefill}
                calls |= {str(dtype): with_all_cores(each.prefill) for dtype, each in theirs.items()}
                yield from beside(f"a prompt of {PROMPT}", PROMPT, calls)
            calls = {"ours": ours.decode}
            calls |= {str(dtype): with_all_cores(each.decode) for dtype, each in theirs.items()}
            yield from beside(f"{batch} decode{'s' * (batch > 1)}", batch, calls)
            ours.worker.close()


def with_all_cores(call: Callable[[], object]) -> Callable[[], object]:
    """Return a call in which torch has all cores."""

    def run() -> None:
        torch.set_num_threads(available_cores())
        call()

    return run


def beside(name: str, tokens: int, calls: dict[str, Callable[[], object]]) -> Iterator[Measured]:
    """Yield our rate, and the ratio to the fastest of the others."""
    seconds = best_of(calls, budget=3.0)
    ours = seconds.pop("ours")
    yield f"hybrid model, {name}: ours", tokens / ours, "tokens/s", None
    for other, each in seconds.items():
        yield f"hybrid model, {name}: transformers, {other.removeprefix('torch.')}", tokens / each, "tokens/s", None
    yield f"hybrid model, {name}: ours / transformers", min(seconds.values()) / ours, "x", 3.0


def rows() -> Iterator[Measured]:
    """Yield all figures."""
    yield from shared_prefixes()
    yield from chats()
    yield from tree()
    with torch.inference_mode():
        torch.set_num_threads(available_cores())
        most = ceiling()
        yield f"memory read by {available_cores()} threads", most, "GB/s", None
        yield from copies(most)
        yield from kernels(most)
        yield from models()
