"""Greedy tokens of core, executor and models together equal those of transformers' `generate`, however batched.

Each test asserts by the core's counters that what it is about really happened.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.kernels.tests.pairwise import alternating
from packages.scheduler.tests.conftest import HYBRID_VARIANTS, HYBRIDS
from tercet.kernels.native.library import missing_library
from tercet.protocol.messages.values import FinishReason, FinishType, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.kv_budget import kv_shapes, state_layers
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import WHOLE
from tercet.scheduler.models.registry import load_config
from tercet.scheduler.testing import Driver, request

Reference = Callable[..., Any]
Expected = Callable[..., list[int]]
Serve = Callable[..., "Server"]

TOKENS, MOST_TOKENS = 80, 200
PAGE_SIZE = 8
VOCAB_SIZE = 389


def some_ids(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1, VOCAB_SIZE) for _ in range(count)]


LONG = some_ids(150, 1)
PROMPTS = {"short": some_ids(5, 2), "long": LONG, "branch": LONG[:90] + some_ids(21, 3)}
"""`branch` shares its first 90 tokens with `long`: 11 whole pages."""

FAMILIES = [
    *("llama", "llama3_rope", "llama_tied", "mistral", "qwen2", "qwen2_sliding", "qwen3", "qwen3_sliding"),
    "deepseek_v3",
]
HYBRID = [*HYBRIDS, *HYBRID_VARIANTS]
OTHERS = ["ministral3", "llama4", "gemma3n", "gemma4", "gemma4_moe", "mimo_v2", "mistral4"]
"""Families whose layers differ in more than their weights: each case of those above, in one test."""

WITH_EXPERTS = [
    *("llama", "llama3_rope", "mistral", "qwen2_sliding", "qwen3", "qwen3_moe", "qwen2_moe", "gpt_oss", "glm4_moe"),
    *("deepseek_v3", "deepseek_v3_moe"),
]

ALIKE = {
    *("llama3_rope", "llama_tied", "qwen2", "qwen3", "qwen3_sliding"),
    *("qwen3_5", "qwen3_5_moe", "lfm2_moe", "granite_hybrid_moe", "deepseek_v3_moe"),
    *("kimi_linear_dense", "olmo_hybrid_nope", *HYBRID_VARIANTS),
}
"""Families with the caches of another one: their tokens are slow. `tests/models/families` compares their logits."""


def by_cache(names: Sequence[str], *options: Any) -> list[Any]:
    """Return names for `parametrize`, each with an option in turn; those in `ALIKE` and further options are slow."""
    distinct = [name for name in names if name not in ALIKE]
    alike = [name for name in names if name in ALIKE]
    if not options:
        return [*distinct, *(pytest.param(name, marks=pytest.mark.slow) for name in alike)]
    slow = (pytest.param(name, option, marks=pytest.mark.slow) for name in alike for option in options)
    return [*alternating(distinct, options), *slow]


families = pytest.mark.parametrize("family", by_cache(FAMILIES))
with_experts = pytest.mark.parametrize("family", by_cache(WITH_EXPERTS))


@pytest.fixture(scope="module")
def expected(checkpoints: Callable[[str], Path], reference: Reference) -> Expected:
    """What transformers generates: `expected(family, prompt's name)`."""
    known: dict[tuple[str, str], list[int]] = {}

    def generate(family: str, prompt: str, tokens: int = TOKENS) -> list[int]:
        if len(known.get((family, prompt), ())) < tokens:
            most = MOST_TOKENS if prompt == "long" and family in (*FAMILIES, *HYBRID) else tokens
            model = reference(checkpoints(family))
            model.generation_config.eos_token_id = None
            ids = torch.tensor([PROMPTS[prompt]])
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
            known[family, prompt] = made[0, ids.shape[1] :].tolist()
        return known[family, prompt][:tokens]

    return generate


class Server(Driver):
    """The core over the real executor, its invariants checked at every step."""

    def __init__(
        self,
        directory: Path,
        *,
        backend: str,
        pages: int = 200,
        overlap: int = 0,
        kv_cache_dtype: str = "auto",
        spare_snapshots: int = 0,
        **config: Any,
    ) -> None:
        shape, settings = load_config(directory), CoreConfig(**config)
        paged = WorkerOptions(model=directory, page_size=PAGE_SIZE)
        page = sum(layer.page_bytes for layer in kv_shapes(paged, shape, WHOLE).values())
        state = sum(tensor.bytes for tensors in state_layers(shape).values() for tensor in tensors)
        # as in `KVBudget`: the states of the slots, a snapshot of each, and a quarter of the rest for more snapshots
        size = pages * page if not state else 2 * 4 * state + pages * (page or 1024) * 4 // 3 + spare_snapshots * state
        options = WorkerOptions(
            model=directory,
            device="cpu",
            page_size=PAGE_SIZE,
            slots=4,
            kv_cache_bytes=size,
            max_total_tokens=None if page and not spare_snapshots else pages * PAGE_SIZE,
            kv_cache_dtype=kv_cache_dtype,
            attention_backend=backend,
            overlap=overlap > 0,
            step_tokens=settings.token_budget,
        )
        worker = TpModelWorker(options)
        super().__init__(worker.capacity, settings, overlap=overlap, executor=worker)

    def ask(self, rid: str, prompt: str | list[int], **more: Any) -> None:
        ids = PROMPTS[prompt] if isinstance(prompt, str) else prompt
        options = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **more}
        self.send(request(rid, ids, **options))


@pytest.fixture(params=["torch_native", "cpu"])
def serve(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Iterator[Callable[..., Server]]:
    """Starts a server: `serve(family, ...)`, on plain torch and on native kernels. In the end all must be empty."""
    if request.param == "cpu" and missing_library():
        pytest.skip(missing_library())
    servers: list[Server] = []

    def start(family: str, **options: Any) -> Server:
        servers.append(Server(checkpoints(family), backend=request.param, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.executor.close()
        server.assert_empty()


@pytest.mark.parametrize(("family", "overlap"), by_cache([*FAMILIES, *HYBRID], 0, 1))
def test_200_tokens_alone_and_in_mixed_batches(family: str, overlap: int, serve: Serve, expected: Expected) -> None:
    """With prompts in chunks. The long answer is alone between the end of the short one and the last prompt."""
    server = serve(family, overlap=overlap, token_budget=23, radix_cache=False)
    for turns, name, tokens in ((3, "short", TOKENS), (120, "long", MOST_TOKENS), (0, "branch", TOKENS)):
        server.ask(name, name, max_new_tokens=tokens)
        for _ in range(turns):
            server.step()
    alone = [plan for plan in server.plans if len(plan.rows) == 1 and plan.rows[0].start > len(LONG)]
    server.run()
    assert len(alone) > 20
    assert server.output["long", 0] == expected(family, "long", MOST_TOKENS)
    assert [server.output[name, 0] for name in ("short", "branch")] == [
        expected(family, "short"),
        expected(family, "branch"),
    ]
    assert len(set(server.output["long", 0])) > 20  # a model that repeats itself would hide mistakes
    assert server.finishes["long", 0] == FinishReason(FinishType.LENGTH)
    counters = server.core.counters
    assert counters.mixed_steps >= 10
    assert counters.chunks >= 10
    assert counters.cached_tokens == 0
    assert counters.steps < MOST_TOKENS + 20


@with_experts
def test_with_radix_hits(family: str, serve: Serve, expected: Expected) -> None:
    server = serve(family)
    server.ask("first", "long")
    server.run()
    assert server.core.counters.cached_tokens == 0
    server.ask("again", "long")
    server.ask("branch", "branch")
    server.ask("further", LONG + expected(family, "long")[:61], max_new_tokens=TOKENS - 61)
    server.run()
    assert server.output["first", 0] == server.output["again", 0] == expected(family, "long")
    assert server.output["branch", 0] == expected(family, "branch")
    assert server.output["further", 0] == expected(family, "long")[61:]
    assert server.core.counters.cached_tokens == 144 + 88 + 208  # whole pages of all but the last token in common


def test_a_cache_of_8_bits_gives_again_what_it_gave(serve: Serve, expected: Expected) -> None:
    """A prompt's end is computed over cached pages as it was over its own keys and values: both are rounded."""
    server = serve("qwen3_moe", kv_cache_dtype="fp8_e4m3")
    for name in ("first", "again"):
        server.ask(name, "long", max_new_tokens=60)
        server.run()
    assert server.core.counters.cached_tokens == 144
    assert server.output["first", 0] == server.output["again", 0] != expected("qwen3_moe", "long")[:60]


@families
def test_after_retraction(family: str, serve: Serve, expected: Expected) -> None:
    server = serve(family, pages=48, radix_cache=False, reserve=0.0, reserve_floor=0.0)
    for name in PROMPTS:
        server.ask(name, name)
    server.run()
    assert server.core.counters.retractions > 0
    assert {name: server.output[name, 0] for name in PROMPTS} == {name: expected(family, name) for name in PROMPTS}


@pytest.mark.parametrize(("family", "overlap"), alternating(["mistral", "qwen2_sliding", "gemma3", "gpt_oss"], [0, 1]))
def test_windows_share_few_pages(family: str, overlap: int, serve: Serve, expected: Expected) -> None:
    """The cache holds more tokens than with equal groups, and pages outside of windows are other texts' by turns."""
    server = serve(family, overlap=overlap, pages=60, token_budget=32)
    full, window = server.core.capacity.groups
    assert full.pages > 60 >= window.pages
    for turn in range(2):
        for name in PROMPTS:
            server.ask(f"{name} {turn}", name)
        server.run()
        assert {name: server.output[f"{name} {turn}", 0] for name in PROMPTS} == {
            name: expected(family, name) for name in PROMPTS
        }
    assert server.core.counters.cached_tokens >= 144
    assert server.core.counters.retractions == 0


@families
def test_forks(family: str, serve: Serve, expected: Expected) -> None:
    """Choices of one request share its prompt's pages, the last one as copies: each is what it would be alone."""
    sampled: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": 7, "max_new_tokens": 40}
    together = serve(family)
    together.ask("greedy", "short", n=2)
    together.ask("sampled", "short", n=2, **sampled)
    together.run()
    assert together.core.counters.forks >= 2
    assert together.core.counters.copies >= 2
    assert together.output["greedy", 0] == together.output["greedy", 1] == expected(family, "short")
    alone = serve(family)
    for choice in (0, 1):
        alone.ask(f"choice {choice}", "short", n=2, resume=[Resume(choice)], **sampled)
        alone.run()
    assert alone.core.counters.forks == 0
    outputs = [together.output["sampled", choice] for choice in (0, 1)]
    assert outputs == [alone.output[f"choice {choice}", choice] for choice in (0, 1)]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize(("family", "overlap"), by_cache(WITH_EXPERTS, 0, 1))
def test_with_guesses(family: str, overlap: int, serve: Serve, expected: Expected) -> None:
    """Several tokens of a choice in one step, right ones and wrong ones, beside others and over the ends of pages."""
    server = serve(family, overlap=overlap, draft_rows=16)
    whole = expected(family, "branch")
    told = [token if position % 7 else (token + 1) % VOCAB_SIZE for position, token in enumerate(whole, start=1)]
    server.ask("branch", "branch", prediction=told)
    server.ask("short", "short")
    server.run()
    assert server.output["branch", 0] == whole
    assert server.output["short", 0] == expected(family, "short")
    counters = server.core.counters
    assert TOKENS // 2 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.steps < TOKENS + 20
    before = counters.accepted_tokens
    server.ask("again", "branch")  # others said it before
    server.run()
    assert server.output["again", 0] == whole
    assert counters.accepted_tokens - before > TOKENS // 2


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}


@pytest.mark.parametrize(("family", "penalties"), by_cache(FAMILIES, {}, PENALTIES))
def test_guesses_change_nothing_that_is_sampled(family: str, penalties: dict[str, float], serve: Serve) -> None:
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "n": 2, "min_new_tokens": 50, **penalties}
    plain, guessing = serve(family), serve(family, draft_rows=9)
    plain.ask("a", "short", **sampled)
    plain.run()
    for rid in ("a", "b"):
        guessing.ask(rid, "short", prediction=plain.output["a", 1], **sampled)
        guessing.run()
        for choice in (0, 1):
            assert guessing.output[rid, choice] == plain.output["a", choice]
    assert guessing.core.counters.accepted_tokens > TOKENS


@families
def test_resumed_elsewhere(family: str, serve: Serve, expected: Expected) -> None:
    server = serve(family)
    whole = expected(family, "branch")
    server.output["a", 0] = whole[:47]
    server.ask("a", "branch", attempt=1, resume=[Resume(0, pack_ints(whole[:47]))])
    server.run()
    assert server.output["a", 0] == whole
    assert server.core.counters.steps == TOKENS - 47


@pytest.mark.parametrize("family", by_cache(HYBRID))
def test_prompts_and_turns_start_from_snapshots(family: str, serve: Serve, expected: Expected) -> None:
    server = serve(family, pages=4000)
    whole = expected(family, "long")
    server.ask("first", "long")
    server.run()
    server.ask("again", "long")
    server.run()
    assert server.output["first", 0] == server.output["again", 0] == whole
    assert server.core.counters.cached_tokens == 144, "the end of the prompt, in whole pages"
    server.ask("turn", LONG + whole[:70], max_new_tokens=10)
    server.run()
    assert server.output["turn", 0] == whole[70:]
    assert server.core.counters.cached_tokens == 144 + 192, "the last snapshot of the output, one every 64 tokens"


@pytest.mark.parametrize("family", by_cache(HYBRID))
def test_a_branch_gets_a_snapshot_from_the_second_prompt_on(family: str, serve: Serve, expected: Expected) -> None:
    server = serve(family, pages=4000)
    for name, cached in (("long", 0), ("branch", 0), ("branch again", 104)):
        before = server.core.counters.cached_tokens
        server.ask(name, name.split()[0])
        server.run()
        assert server.output[name, 0] == expected(family, name.split()[0])
        assert server.core.counters.cached_tokens - before == cached
    server.ask("third", LONG[:90] + some_ids(20, 9), max_new_tokens=4)
    before = server.core.counters.cached_tokens
    server.run()
    assert server.core.counters.cached_tokens - before == 88, "where the first two part"


@pytest.mark.parametrize(("family", "overlap"), by_cache(HYBRID, 0, 1))
def test_guesses_with_recurrent_states(family: str, overlap: int, serve: Serve, expected: Expected) -> None:
    """Wrong ones are undone, in chunked and mixed batches, choices of one prompt, after retraction and resumption."""
    few = {"pages": 44, "reserve": 0.0, "reserve_floor": 0.0}
    server = serve(family, overlap=overlap, spare_snapshots=24, token_budget=23, draft_rows=8, **few)
    whole = expected(family, "branch")
    told = [token if position % 7 else (token + 1) % VOCAB_SIZE for position, token in enumerate(whole, start=1)]
    server.ask("long", "long")
    for _ in range(9):
        server.step()
    server.ask("branch", "branch", n=3, prediction=told)
    server.run()
    assert server.output["long", 0] == expected(family, "long")
    assert [server.output["branch", choice] for choice in range(3)] == [whole] * 3
    counters = server.core.counters
    assert counters.mixed_steps > 0
    assert counters.chunks >= 5
    assert counters.retractions > 0
    assert counters.cached_tokens >= 2 * 104
    server.output["resumed", 0] = whole[:31]
    before = counters.accepted_tokens, counters.drafted_tokens, len(server.plans)
    server.ask("resumed", "branch", attempt=1, resume=[Resume(0, pack_ints(whole[:31]))], prediction=told)
    server.run()
    assert server.output["resumed", 0] == whole
    accepted, drafted, undone = counters.accepted_tokens, counters.drafted_tokens, server.plans[before[2] + 1 :]
    assert 0 < before[0] < accepted - 20
    assert before[1] - before[0] < drafted - accepted, "some are wrong at every stage"
    assert any(plan.restores for plan in undone)


@pytest.mark.parametrize("family", OTHERS)
def test_families_whose_layers_differ_in_every_case(
    family: str, serve: Serve, checkpoints: Callable[[str], Path], reference: Reference
) -> None:
    pages = 36 if family in ("gemma3n", "gemma4_moe", "mimo_v2") else 46  # with windows, more tokens fit
    server = serve(family, pages=pages, token_budget=23, draft_rows=8, reserve=0.0, reserve_floor=0.0)
    server.ask("long", "long", max_new_tokens=MOST_TOKENS)
    for _ in range(9):
        server.step()
    server.ask("short", "short", n=3, max_new_tokens=70)
    server.ask("branch", "branch", max_new_tokens=70)
    server.run()
    whole = server.output["branch", 0]
    told = [token if position % 7 else (token + 1) % VOCAB_SIZE for position, token in enumerate(whole, start=1)]
    server.ask("told", "branch", prediction=told, max_new_tokens=70)
    server.output["resumed", 0] = whole[:47]
    server.ask("resumed", "branch", attempt=1, resume=[Resume(0, pack_ints(whole[:47]))], max_new_tokens=70)
    server.run()
    model = reference(checkpoints(family))
    for name, prompt in PROMPTS.items():
        said = server.output[name, 0]
        with torch.inference_mode():  # every token is the likeliest one after those before it
            likeliest = model(torch.tensor([prompt + said])).logits[0].argmax(1).tolist()
        assert said == likeliest[len(prompt) - 1 : -1]
        assert len({*said}) > 20  # a model that repeats itself would hide mistakes
    assert server.output["told", 0] == server.output["resumed", 0] == whole
    assert server.output["short", 1] == server.output["short", 2] == server.output["short", 0]
    counters = server.core.counters
    assert counters.mixed_steps > 0
    assert counters.chunks >= 5
    assert counters.retractions > 0
    if server.core.memory.windows is None:  # with windows, choices share cached pages only
        assert counters.forks >= 1
    assert counters.cached_tokens >= 88
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
