"""The runner over a tiny random model, against the same model computed densely, without cache, pages or batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.protocol.messages.values import Logprobs, SamplingParams, pack_ints, unpack_floats, unpack_ints
from tercet.scheduler.core.plan import PageCopy, PageUpdate, Plan, Row, SlotInit, StepResult
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.sampling import prompt_scorer

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 31, 24, 4, 2, 6
PAGE, PAGES, SLOTS, CONTEXT = 4, 40, 6, 64
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=50, temperature=0.0)
POISON = VOCAB - 1
"""A token whose embedding is NaN in a poisoned model."""


class TinyModel(nn.Module):
    """Two layers of rotary attention, one of which may see through a window only."""

    def __init__(self, windows: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.windows = windows
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM) for _ in windows)
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, HIDDEN) for _ in windows)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.rope = rope_cache(CONTEXT, HEAD_DIM, 100.0)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: "Attends") -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids) * 3
        for layer, window in enumerate(self.windows):
            heads = self.qkv[layer](x).view(len(x), -1, HEAD_DIM)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            q, k = apply_rope(q, k, positions, self.rope)
            seen = batch.attend(layer, q, k, v, AttentionParams(scale=1.0, window=window))
            x = torch.tanh(x + self.out[layer](seen.flatten(1)) * 3)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden) * 5
        return logits


class Attends:
    """Dense causal attention over one whole sequence."""

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        count, window = len(q), params.window
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
        back = torch.arange(count)[:, None] - torch.arange(count)
        hidden = (back < 0) | ((back >= window) if window else torch.zeros_like(back, dtype=torch.bool))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@torch.inference_mode()
def dense_logits(model: TinyModel, tokens: Sequence[int]) -> torch.Tensor:
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), Attends())
    return model.compute_logits(hidden)


def dense_greedy(model: TinyModel, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass
class Play:
    """Writes plans as a scheduler would, handing out pages in a scattered order."""

    model: TinyModel
    groups: tuple[tuple[int, ...], ...] = ((0, 1),)
    step: int = 0
    introduce: list[SlotInit] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = KVShape(page_size=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
        groups = [
            KVGroup(name=f"g{i}", layers=dict.fromkeys(layers, shape), pages=PAGES)
            for i, layers in enumerate(self.groups)
        ]
        self.runner = ModelRunner(
            self.model,
            KVPool(groups, CPU),
            TorchNativeAttention,
            slots=SLOTS,
            context_length=CONTEXT,
            vocab_size=VOCAB,
            device=CPU,
        )
        self.free = [
            torch.randperm(PAGES, generator=torch.Generator().manual_seed(i)).tolist() for i in range(len(groups))
        ]
        self.tables: dict[int, list[list[int]]] = {}

    def add(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        prompt: int | None = None,
        sampling: SamplingParams = GREEDY,
        shared: Sequence[list[int]] = (),
        choice: int = 0,
        suppressed: Sequence[int] = (),
        top: int = -1,
        prompt_logprobs: bool = False,
    ) -> None:
        """A choice takes a slot; `shared` pages of each group come first in its table."""
        self.introduce.append(
            SlotInit(
                slot=slot,
                tokens=pack_ints(tokens),
                prompt_tokens=len(tokens) if prompt is None else prompt,
                choice=choice,
                sampling=sampling,
                suppressed_ids=list(suppressed),
                top_logprobs=top,
                prompt_logprobs=prompt_logprobs,
            )
        )
        self.tables[slot] = [[] for _ in self.groups]
        if shared:
            self._give(slot, [list(pages) for pages in shared])

    def run(self, *rows: Row) -> StepResult:
        for row in rows:
            missing = -(-(row.start + row.count) // PAGE) - len(self.tables[row.slot][0])
            if missing > 0:
                self._give(row.slot, [[free.pop() for _ in range(missing)] for free in self.free])
        plan = Plan(step=self.step, introduce=self.introduce, pages=self.pages, copies=self.copies, rows=list(rows))
        self.step += 1
        self.introduce, self.pages, self.copies = [], [], []
        return self.runner.execute(plan).result()

    def _give(self, slot: int, pages: list[list[int]]) -> None:
        table = self.tables[slot]
        self.pages.append(PageUpdate(slot, len(table[0]), pages))
        for group, more in zip(table, pages, strict=True):
            group.extend(more)

    def decode(self, slot: int, start: int, count: int) -> list[int]:
        """Sample `count` tokens one by one; `start` is the first token without keys and values."""
        return [self.run(Row(slot, start + i, 1, sample=True)).token_ids[0] for i in range(count)]


PROMPT = [3, 14, 15, 9, 26, 5, 3, 5, 8, 9, 7]


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.mark.parametrize("windows", [(0, 0), (0, 3), (5, 2)])
@pytest.mark.parametrize("groups", [((0, 1),), ((0,), (1,)), ((1,), (0,))])
@pytest.mark.parametrize("chunks", [[11], [4, 7], [1, 3, 1, 5, 1], [10, 1]])
def test_chunks_then_decode(windows: tuple[int, int], groups: tuple[tuple[int, ...], ...], chunks: list[int]) -> None:
    model = TinyModel(windows)
    play = Play(model, groups)
    play.add(2, PROMPT)
    start = 0
    for count in chunks:
        result = play.run(Row(2, start, count, sample=start + count == len(PROMPT)))
        start += count
        assert (result.token_ids[0] == -1) == (start < len(PROMPT))
    tokens = [result.token_ids[0], *play.decode(2, len(PROMPT), 14)]
    assert tokens == dense_greedy(model, PROMPT, 15)
    assert len(set(tokens)) > 3


def test_rows_of_every_kind_in_one_step(model: TinyModel) -> None:
    play = Play(model)
    play.add(0, PROMPT)
    play.add(1, PROMPT[::-1])
    first = play.run(Row(0, 0, 11, sample=True), Row(1, 0, 4, sample=False))
    play.add(5, [1, 2, 3])
    second = play.run(Row(0, 11, 1, sample=True), Row(1, 4, 7, sample=True), Row(5, 0, 3, sample=True))
    third = play.run(*(Row(slot, start, 1, sample=True) for slot, start in ((5, 3), (0, 12), (1, 11))))
    assert [first.token_ids[0], second.token_ids[0], third.token_ids[1]] == dense_greedy(model, PROMPT, 3)
    assert [second.token_ids[1], third.token_ids[2]] == dense_greedy(model, PROMPT[::-1], 2)
    assert [second.token_ids[2], third.token_ids[0]] == dense_greedy(model, [1, 2, 3], 2)


def test_the_next_plan_may_run_before_the_last_result_is_read(model: TinyModel) -> None:
    play = Play(model)
    play.add(0, PROMPT)
    play.run(Row(0, 0, 10, sample=False))
    plans = [Plan(step=step, rows=[Row(0, 10 + step, 1, sample=True)]) for step in range(2)]
    outputs = [play.runner.execute(plan) for plan in plans]
    assert [output.result().token_ids[0] for output in outputs[::-1]] == dense_greedy(model, PROMPT, 2)[::-1]


@pytest.mark.parametrize("groups", [((0, 1),), ((0,), (1,))])
def test_a_fork_shares_full_pages_and_copies_the_last(model: TinyModel, groups: tuple[tuple[int, ...], ...]) -> None:
    play = Play(model, groups)
    play.add(0, PROMPT)
    leader = [play.run(Row(0, 0, 11, sample=True)).token_ids[0]]
    original = [list(pages) for pages in play.tables[0]]
    own = [free.pop() for free in play.free]
    pages = [[*shared[:2], page] for shared, page in zip(original, own, strict=True)]
    play.add(1, [*PROMPT, 20], prompt=11, shared=pages, top=0)
    play.copies = [PageCopy(group, source[2], own[group]) for group, source in enumerate(original)]
    result = play.run(Row(1, 11, 1, sample=True), Row(0, 11, 1, sample=True))
    leader += [result.token_ids[1], *play.decode(0, 12, 4)]
    fork = [result.token_ids[0], *play.decode(1, 12, 4)]
    assert leader == dense_greedy(model, PROMPT, 6)
    assert fork == dense_greedy(model, [*PROMPT, 20], 5)
    likeliest = dense_logits(model, [*PROMPT, 20])[-1].log_softmax(-1).max()
    torch.testing.assert_close(entries(result.logprobs[0])[0][0], likeliest, rtol=1e-5, atol=1e-5)


def test_two_slots_read_one_prefix(model: TinyModel) -> None:
    play = Play(model)
    play.add(0, PROMPT)
    play.run(Row(0, 0, 11, sample=True))
    tails = [[1, 2], [22, 23, 24, 25]]
    for slot, tail in enumerate(tails, start=1):
        play.add(slot, PROMPT[:8] + tail, shared=[play.tables[0][0][:2]])
    result = play.run(Row(1, 8, 2, sample=True), Row(2, 8, 4, sample=True))
    assert result.token_ids == [dense_greedy(model, PROMPT[:8] + tail, 1)[0] for tail in tails]


def test_a_slot_is_taken_over_by_another_choice(model: TinyModel) -> None:
    play = Play(model)
    pushy = replace_params(frequency_penalty=2.0, logit_bias={4: 100.0})
    play.add(0, PROMPT, sampling=pushy)
    assert play.run(Row(0, 0, 11, sample=True)).token_ids == [4]
    play.add(0, [7, 7, 1])
    assert play.run(Row(0, 0, 3, sample=True)).token_ids == dense_greedy(model, [7, 7, 1], 1)
    assert play.decode(0, 3, 5) == dense_greedy(model, [7, 7, 1], 6)[1:]


def test_a_row_without_finite_logits_says_so_and_harms_no_other(model: TinyModel) -> None:
    with torch.no_grad():
        model.embedding.weight[POISON] = torch.nan
    play = Play(model)
    play.add(0, [1, POISON, 2], top=2)
    play.add(1, PROMPT, top=2)
    first = play.run(Row(0, 0, 3, sample=True), Row(1, 0, 11, sample=True))
    second = play.run(Row(0, 3, 1, sample=True), Row(1, 11, 1, sample=True))
    assert [first.token_ids[0], second.token_ids[0]] == [-1, -1]
    assert [first.token_ids[1], second.token_ids[1]] == dense_greedy(model, PROMPT, 2)
    assert set(first.logprobs) == {1}


def replace_params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 50, "temperature": 0.0, **changes})  # type: ignore[arg-type]


def entries(given: Logprobs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (len(given), given.top)
    ids, values = list(unpack_ints(given.top_ids)), list(unpack_floats(given.top_logprobs))
    return (
        torch.tensor(list(unpack_floats(given.chosen))),
        torch.tensor(ids).view(shape),
        torch.tensor(values).view(shape),
    )


@pytest.mark.parametrize("chunks", [[11], [3, 4, 4], [10, 1]])
def test_prompt_logprobs_over_chunks(model: TinyModel, chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scorer, "_CHUNK", 3)
    play = Play(model)
    play.add(0, PROMPT, top=2, prompt_logprobs=True)
    play.add(1, PROMPT)
    play.run(Row(1, 0, 11, sample=True))
    parts: list[tuple[int, Logprobs]] = []
    start = 0
    for count in chunks:
        rows = (Row(1, start + 11, 1, sample=True), Row(0, start, count, sample=start + count == 11))
        parts += play.run(*rows).prompt_logprobs.items()
        start += count
    assert {row for row, _ in parts} == {1}
    chosen, ids, values = (torch.cat(tensors) for tensors in zip(*(entries(part) for _, part in parts), strict=True))
    expected = dense_logits(model, PROMPT).log_softmax(-1)[:-1]
    torch.testing.assert_close(
        chosen, expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0], rtol=1e-4, atol=1e-4
    )
    best = expected.topk(2)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(values, best.values, rtol=1e-4, atol=1e-4)
    assert play.run(Row(0, 11, 1, sample=True)).prompt_logprobs == {}


def test_prompt_logprobs_end_with_the_prompt_of_a_resumed_choice(model: TinyModel) -> None:
    play = Play(model)
    play.add(0, PROMPT, prompt=6, prompt_logprobs=True)
    result = play.run(Row(0, 0, 11, sample=True))
    assert len(result.prompt_logprobs[0]) == 5
    assert result.prompt_logprobs[0].top == 0


def test_token_logprobs_are_raw(model: TinyModel) -> None:
    play = Play(model)
    play.add(0, PROMPT, sampling=replace_params(logit_bias={4: 100.0}, presence_penalty=1.5), top=3)
    play.add(1, PROMPT, top=0)
    play.add(2, PROMPT)
    result = play.run(*(Row(slot, 0, 11, sample=True) for slot in range(3)))
    expected = dense_logits(model, PROMPT)[-1].log_softmax(-1)
    assert set(result.logprobs) == {0, 1}
    chosen, ids, values = entries(result.logprobs[0])
    assert result.token_ids[0] == 4
    torch.testing.assert_close(chosen[0], expected[4], rtol=1e-4, atol=1e-4)
    assert torch.equal(ids[0], expected.topk(3).indices)
    torch.testing.assert_close(values[0], expected.topk(3).values, rtol=1e-4, atol=1e-4)
    chosen, ids, _ = entries(result.logprobs[1])
    assert ids.numel() == 0
    torch.testing.assert_close(chosen[0], expected.max(), rtol=1e-4, atol=1e-4)


SAMPLED = replace_params(temperature=1.3, top_p=0.95, frequency_penalty=0.7, repetition_penalty=1.2, seed=1 << 40)


def test_a_choice_that_moves_to_another_slot_goes_on_as_if_it_had_not(model: TinyModel) -> None:
    play = Play(model)
    play.add(0, PROMPT, sampling=SAMPLED, choice=2)
    tokens = [play.run(Row(0, 0, 11, sample=True)).token_ids[0], *play.decode(0, 11, 12)]
    again = Play(model)
    again.add(4, PROMPT + tokens[:6], prompt=11, sampling=SAMPLED, choice=2)
    resumed = [again.run(Row(4, 0, 17, sample=True)).token_ids[0], *again.decode(4, 17, 6)]
    assert resumed == tokens[6:]
    assert len(set(tokens)) > 3


def test_choices_of_one_seed_differ_and_batching_changes_none(model: TinyModel) -> None:
    together = Play(model)
    wishes = [SAMPLED, GREEDY, replace_params(temperature=2.0, seed=3), replace_params(temperature=1.0, top_k=4)]
    for slot, sampling in enumerate([*wishes, SAMPLED]):
        together.add(slot, PROMPT, sampling=sampling, choice=slot)
    slots = range(len(wishes) + 1)
    texts = [[token] for token in together.run(*(Row(slot, 0, 11, sample=True) for slot in slots)).token_ids]
    for position in range(11, 22):
        for slot, token in enumerate(together.run(*(Row(s, position, 1, sample=True) for s in slots)).token_ids):
            texts[slot].append(token)
    for slot, sampling in enumerate([*wishes, SAMPLED]):
        alone = Play(model)
        alone.add(0, PROMPT, sampling=sampling, choice=slot)
        first = alone.run(Row(0, 0, 11, sample=True)).token_ids
        assert first + alone.decode(0, 11, 11) == texts[slot]
    assert texts[0] != texts[-1]


def test_end_ids_are_suppressed_until_enough_was_said(model: TinyModel) -> None:
    greedy = dense_greedy(model, PROMPT, 1)[0]
    play = Play(model)
    play.add(0, PROMPT, sampling=replace_params(min_new_tokens=2, logit_bias={greedy: 100.0}), suppressed=[greedy])
    first = play.run(Row(0, 0, 11, sample=True)).token_ids[0]
    second, third = play.decode(0, 11, 2)
    assert greedy not in {first, second}
    assert third == greedy


def test_an_unknown_slot_is_refused(model: TinyModel) -> None:
    play = Play(model)
    play.tables[3] = [[]]
    with pytest.raises(ValueError, match="slot 3 was never introduced"):
        play.run(Row(3, 0, 2, sample=True))


def test_plans_are_values_that_travel(model: TinyModel) -> None:
    import msgspec

    play = Play(model)
    play.add(0, PROMPT)
    expected = play.run(Row(0, 0, 11, sample=True))
    other = Play(model)
    other.add(0, PROMPT)
    other._give(0, [[3, 9, 1]])
    plan = Plan(step=0, introduce=other.introduce, pages=other.pages, rows=[Row(0, 0, 11, sample=True)])
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert other.runner.execute(travelled).result() == expected
