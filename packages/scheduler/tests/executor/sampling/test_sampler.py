"""The sampler over rows of every kind at once, against a reference that treats one row and one token at a time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops import sampler_ops, sampling
from tercet.kernels.ops.philox import gumbel_reference
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.sampling.sampler import Sampler, SamplingOps

VOCAB = 37
CPU = torch.device("cpu")
PROMPT = [1, 2, 3, 2, 30]


def init(
    slot: int, output: Sequence[int] = (), *, suppressed: Sequence[int] = (), top: int = -1, **params: Any
) -> SlotInit:
    return SlotInit(
        slot=slot,
        tokens=pack_ints([*PROMPT, *output]),
        prompt_tokens=len(PROMPT),
        choice=slot % 3,
        sampling=SamplingParams(**{"max_new_tokens": 99, "seed": 1000 + slot, **params}),
        suppressed_ids=list(suppressed),
        top_logprobs=top,
    )


def reference(logits: list[float], given: SlotInit, output: Sequence[int]) -> int:
    """One token, step by step in Python's floats."""
    params = given.sampling
    scores = {}
    for token, logit in enumerate(logits):
        if token in {*PROMPT, *output}:
            logit *= params.repetition_penalty ** (-1 if logit > 0 else 1)
        said = params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        scores[token] = logit - said + params.logit_bias.get(token, 0.0)
    if len(output) < params.min_new_tokens:
        scores = {token: score for token, score in scores.items() if token not in given.suppressed_ids}
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if params.temperature == 0:
        return order[0]
    order = order[: params.top_k or None]
    weights = {token: math.exp((scores[token] - scores[order[0]]) / params.temperature) for token in order}
    kept, mass = [], 0.0
    for token in order:
        if (params.top_p < 1 and mass >= params.top_p * sum(weights.values())) or weights[token] < params.min_p:
            break
        kept.append(token)
        mass += weights[token]

    def score(token: int) -> float:
        return math.log(weights[token]) + gumbel_reference(params.seed, given.choice, len(output), token)

    return max(kept, key=score)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_k one": {"temperature": 1.5, "top_k": 1},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "all filters": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.8, "repetition_penalty": 1.7},
    "frequency": {"temperature": 0.8, "frequency_penalty": 0.9},
    "presence": {"temperature": 0.0, "presence_penalty": 1.1},
    "bias": {"temperature": 0.9, "logit_bias": {3: 4.0, 8: -100.0}},
    "minimum": {"temperature": 0.0, "min_new_tokens": 4, "suppressed": [0, 5, 6, 7, 8]},
    "everything": {
        "temperature": 1.1,
        "top_k": 15,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {1: 2.0},
        "min_new_tokens": 6,
        "suppressed": [2, 9],
        "seed": 2**64 - 1,
        "top": 3,
    },
}


def logits_of(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(100 + step)) * 2


def test_every_kind_of_row_in_one_batch_equals_the_reference(ops: SamplingOps) -> None:
    inits = [init(slot, **params) for slot, params in enumerate(KINDS.values())]
    sampler = Sampler(len(inits) + 2, VOCAB, CPU, ops)
    sampler.introduce(inits)
    outputs: list[list[int]] = [[] for _ in inits]
    slots = list(range(len(inits)))
    for step in range(8):
        logits = logits_of(step, len(inits))
        expected = [reference(logits[slot].tolist(), inits[slot], outputs[slot]) for slot in slots]
        sampled = sampler.sample(logits.clone(), slots, [step] * len(slots))
        assert dict(zip(KINDS, sampled.tokens.tolist(), strict=True)) == dict(zip(KINDS, expected, strict=True))
        for output, token in zip(outputs, expected, strict=True):
            output.append(token)
    assert all(len(set(output)) > 2 for output in outputs)


@pytest.mark.parametrize("kinds", [["greedy", "top_k one"], ["plain", "all filters"], list(KINDS)], ids=len)
def test_logits_of_16_bits_give_what_their_float32_would(kinds: list[str], ops: SamplingOps) -> None:
    if isinstance(ops, NativeOps):
        pytest.skip("native logits are float32")
    logits = logits_of(0, len(kinds)).to(torch.bfloat16 if ops is sampler_ops else torch.float16)  # as interpreted
    words = torch.full((len(kinds), 2), -2, dtype=torch.int32)  # all but one
    found = []
    for given in (logits, logits.float()):
        sampler = Sampler(len(kinds), VOCAB, CPU, ops)
        sampler.introduce([init(slot, **{"top": 2, **KINDS[kind]}) for slot, kind in enumerate(kinds)])
        sampled = sampler.sample(given.clone(), range(len(kinds)), [0] * len(kinds), words.clone)
        assert sampled.logprobs is not None
        found.append((sampled.tokens, sampled.logprobs.chosen, sampled.logprobs.top_ids, sampled.logprobs.top_logprobs))
    for half, full in zip(*found, strict=True):
        assert torch.equal(half, full)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_introduced_late_goes_on_where_it_was(kind: str) -> None:
    given = init(0, **KINDS[kind])
    sampler = Sampler(3, VOCAB, CPU)
    sampler.introduce([given])
    output: list[int] = []
    for step in range(8):
        output += sampler.sample(logits_of(step, 1), [0], [step]).tokens.tolist()
    late = init(0, output[:5], **KINDS[kind])
    moved = SlotInit(
        slot=2,
        tokens=late.tokens,
        prompt_tokens=late.prompt_tokens,
        choice=0,
        sampling=late.sampling,
        suppressed_ids=late.suppressed_ids,
    )
    sampler.introduce([init(2, presence_penalty=2.0, seed=5), init(0, temperature=0.0)])
    sampler.introduce([moved])
    assert [int(sampler.sample(logits_of(step, 1), [2], [step]).tokens) for step in range(5, 8)] == output[5:]


def test_broken_rows_give_nothing_and_count_nothing(ops: SamplingOps) -> None:
    given = [
        init(0, presence_penalty=1.0, temperature=0.0),
        init(1, top_p=0.5),
        init(2, temperature=0.0, top=1),
        init(3),
    ]
    sampler = Sampler(4, VOCAB, CPU, ops)
    sampler.introduce(given)
    logits = logits_of(0, 4)
    expected = [reference(logits[row].tolist(), given[row], []) for row in range(4)]
    broken = logits.clone()
    broken[0, 9], broken[1, 3], broken[2] = torch.nan, torch.inf, -torch.inf
    assert sampler.sample(broken, [0, 1, 2, 3], [0] * 4).tokens.tolist() == [-1, -1, -1, expected[3]]
    assert sampler.sample(logits, [0, 1, 2, 3], [0] * 4).tokens.tolist() == expected


def test_slots_are_sampled_by_the_parameters_of_whoever_has_them_now(ops: SamplingOps) -> None:
    sampler = Sampler(3, VOCAB, CPU, ops)
    given = {slot: init(slot, **KINDS[kind]) for slot, kind in enumerate(["top_p", "plain", "greedy"])}
    sampler.introduce([*given.values()])
    for tenant in (given[1], init(1, temperature=0.4, seed=9, top=1), init(1, temperature=0.0), init(1, min_p=0.3)):
        given[1] = tenant
        sampler.introduce([tenant])
        for step, slots in enumerate([[0, 1, 2], [0, 1, 2], [2, 0, 1], [1]]):
            logits = logits_of(step, len(slots))
            expected = [reference(logits[row].tolist(), given[slot], [0] * step) for row, slot in enumerate(slots)]
            sampled = sampler.sample(logits.clone(), slots, [step] * len(slots))
            assert sampled.tokens.tolist() == expected
            assert (sampled.logprobs is not None) == (tenant.top_logprobs >= 0)


def test_a_row_of_which_everything_is_suppressed_gives_nothing(ops: SamplingOps) -> None:
    sampler = Sampler(2, VOCAB, CPU, ops)
    everything: dict[str, Any] = {"suppressed": range(VOCAB), "min_new_tokens": 1}
    sampler.introduce([init(0, temperature=0.0, **everything), init(1, **everything)])
    assert sampler.sample(logits_of(0, 2), [0, 1], [0, 0]).tokens.tolist() == [-1, -1]


def test_small_blocks_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(8, VOCAB, CPU)
    sampler.introduce([init(slot, top_p=0.9 if slot % 2 else 1.0) for slot in range(8)])
    whole = sampler.sample(logits_of(0, 8), range(8), [0] * 8).tokens
    monkeypatch.setattr(sampling, "_BLOCK", 1)
    assert torch.equal(sampler.sample(logits_of(0, 8), range(8), [0] * 8).tokens, whole)


def test_the_counts_of_a_slot_are_those_of_its_last_choice_alone() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    for turn in range(50):  # as many turns as it takes to run out of rows, were they not given back
        sampler.introduce([init(turn % 2, [6], temperature=0.0, repetition_penalty=4.0)])
    other = init(0, temperature=0.0, repetition_penalty=4.0)
    other = SlotInit(slot=0, tokens=pack_ints([9]), prompt_tokens=1, choice=0, sampling=other.sampling)
    sampler.introduce([other])
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 6], logits[0, 9] = 3.0, 2.0, 4.0  # 2 and 6 were the earlier choice's, 9 is penalised
    assert sampler.sample(logits, [0], [0]).tokens.tolist() == [2]
    assert len(sampler._counts._output) == 4


def test_counts_outgrow_their_first_table() -> None:
    sampler = Sampler(40, VOCAB, CPU)
    inits = [init(slot, [4, 4], temperature=0.0, frequency_penalty=0.5) for slot in range(23)]
    sampler.introduce(inits[:3])
    sampler.introduce(inits[3:])
    logits = torch.zeros(23, VOCAB)
    logits[:, 4] = 0.9
    logits[:, 6] = 0.1
    assert sampler.sample(logits, range(23), [2] * 23).tokens.tolist() == [6] * 23


def test_rows_that_nothing_changes_are_scored_where_they_lie(ops: SamplingOps) -> None:
    """Beside one that is penalised and does not report, and one that reports what it was before it was changed."""
    given = [
        init(0, presence_penalty=2.0, temperature=0.0),
        init(1, temperature=1.3, top_p=0.7, top=2),
        init(2, temperature=0.0, top=0),
        init(3, temperature=0.9),
    ]
    changed = init(4, repetition_penalty=3.0, temperature=0.0, top=1)
    raw = logits_of(0, 5)
    expected = raw.double().log_softmax(-1).float()
    for inits in (given, [*given, changed]):
        rows = len(inits)
        sampler = Sampler(5, VOCAB, CPU, ops)
        sampler.introduce(inits)
        sampled = sampler.sample(raw[:rows].clone(), range(rows), [0] * rows)
        assert sampled.logprobs is not None
        reporting = [1, 2, 4][: rows - 2]
        assert sampled.logprobs.rows == reporting
        torch.testing.assert_close(sampled.logprobs.chosen, expected[reporting, sampled.tokens[reporting]])
        torch.testing.assert_close(sampled.logprobs.top_logprobs[0], expected[1].topk(2).values)


@pytest.mark.parametrize("kinds", [list(KINDS), ["plain"], ["greedy", "cold"]], ids=len)
def test_processed_logprobs_are_of_the_distribution_that_is_sampled(kinds: list[str], ops: SamplingOps) -> None:
    """Of logits after penalties, biases and masks, divided by the temperature; filters leave them unchanged."""
    inits = [init(slot, [4, 4], **{**KINDS[kind], "top": 2}) for slot, kind in enumerate(kinds)]
    sampler = Sampler(len(kinds), VOCAB, CPU, ops, logprobs_mode="processed")
    sampler.introduce(inits)
    raw = logits_of(0, len(kinds))
    words = torch.full((len(kinds), 2), -1, dtype=torch.int32)
    words[0] = torch.tensor([0b1111000, 0])  # the first row's grammar allows four tokens
    sampled = sampler.sample(raw.clone(), range(len(kinds)), [2] * len(kinds), words.clone)
    assert sampled.logprobs is not None
    for row, given in enumerate(inits):
        allowed = range(3, 7) if row == 0 else range(VOCAB)
        expected = processed(raw[row].tolist(), given, [4, 4], allowed)
        best = sorted(expected.values(), reverse=True)[:2]
        token = int(sampled.tokens[row])
        assert math.isclose(sampled.logprobs.chosen[row].item(), expected[token], abs_tol=1e-4), kinds[row]
        assert sampled.logprobs.top_logprobs[row].tolist() == pytest.approx(best, abs=1e-4)
        assert [expected[each] for each in sampled.logprobs.top_ids[row].tolist()] == pytest.approx(best, abs=1e-4)


def processed(logits: list[float], given: SlotInit, output: Sequence[int], allowed: Sequence[int]) -> dict[int, float]:
    """Return the log-probabilities of the tokens that can be drawn, in Python's floats."""
    params = given.sampling
    scores = {}
    for token in allowed:
        logit = logits[token]
        if token in {*PROMPT, *output}:
            logit *= params.repetition_penalty ** (-1 if logit > 0 else 1)
        said = params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        scores[token] = logit - said + params.logit_bias.get(token, 0.0)
    if len(output) < params.min_new_tokens:
        scores = {token: score for token, score in scores.items() if token not in given.suppressed_ids}
    draws = params.temperature > 0 and params.top_k != 1
    shaped = {token: score / (params.temperature if draws else 1) for token, score in scores.items()}
    total = math.log(sum(map(math.exp, shaped.values())))
    return {token: value - total for token, value in shaped.items()}


def test_what_others_drew_is_what_is_counted_and_reported() -> None:
    """Of two rows the second is told another token than it would have drawn."""
    agreed: list[list[int]] = []

    def agree(tokens: torch.Tensor) -> torch.Tensor:
        agreed.append(tokens.tolist())
        return torch.tensor([int(tokens[0]), 9, *tokens[2:].tolist()])

    sampler, alone = Sampler(2, VOCAB, CPU, agree=agree), Sampler(2, VOCAB, CPU)
    inits = [init(slot, temperature=0.0, frequency_penalty=0.5, top=3) for slot in range(2)]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    for each in (sampler, alone):
        each.introduce(inits)
    sampled, mine = (each.sample(logits.clone(), [0, 1], [0, 0]) for each in (sampler, alone))
    assert agreed == [mine.tokens.tolist()]
    assert mine.tokens[1] != 9
    assert sampled.tokens.tolist() == [int(mine.tokens[0]), 9]
    assert sampled.logprobs is not None
    expected = logits.log_softmax(1)[[0, 1], sampled.tokens]
    torch.testing.assert_close(sampled.logprobs.chosen, expected)
    counts = sampler._counts
    assert counts.table.output[counts.rows([1])].nonzero()[:, 1].tolist() == [9]


def test_what_others_drew_is_what_a_graph_gives() -> None:
    sampler = Sampler(2, VOCAB, CPU, agree=lambda tokens: tokens + 1)
    sampler.introduce([init(slot, temperature=0.0) for slot in range(2)])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    mode = sampler.mode(np.arange(2))
    assert mode is not None
    tokens = sampler.sample_uniform(logits, mode, torch.zeros(2, dtype=torch.int64))
    assert tokens.tolist() == (logits.argmax(1) + 1).tolist()
