"""The sampler under grammar masks, against a search through one row and one token at a time."""

from typing import Any

import pytest
import torch

from tercet.kernels.ops.bitmask import pack_bitmask
from tercet.kernels.ops.philox import gumbel_reference
from tercet.protocol.messages.values import Grammar, GrammarKind, SamplingParams, pack_ints
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.sampling.sampler import Sampler, SamplingOps

VOCAB = 75
CPU = torch.device("cpu")
GRAMMAR = Grammar(GrammarKind.REGEX, "")

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "logit_bias": {5: 50.0, 6: 40.0}},
]


def init(slot: int, suppressed: list[int], grammar: Grammar | None = GRAMMAR, **params: Any) -> SlotInit:
    return SlotInit(
        slot=slot,
        tokens=pack_ints([1]),
        prompt_tokens=1,
        choice=0,
        sampling=SamplingParams(max_new_tokens=9, seed=slot, grammar=grammar, **params),
        suppressed_ids=suppressed,
        top_logprobs=2,
    )


def expected(logits: list[float], allowed: list[bool], params: dict[str, Any], slot: int) -> int:
    """The choice among the allowed tokens, as if there were no others."""
    bias: dict[int, float] = params.get("logit_bias", {})
    scores = {token: logits[token] + bias.get(token, 0.0) for token in range(VOCAB)}
    order = sorted((token for token in scores if allowed[token]), key=lambda token: (-scores[token], token))
    if params["temperature"] == 0:
        return order[0]
    order = order[: params.get("top_k") or None]
    weights = torch.tensor([scores[token] for token in order], dtype=torch.float64).div(params["temperature"])
    shares = weights.softmax(0).tolist()
    kept, mass = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if mass >= params.get("top_p", 1) or share < params.get("min_p", 0) * shares[0]:
            break
        kept.append(token)
        mass += share

    def score(token: int) -> float:
        return scores[token] / float(params["temperature"]) + gumbel_reference(slot, 0, 0, token)

    return max(kept, key=score)


def test_masked_rows_choose_among_what_is_left_and_others_as_ever(ops: SamplingOps) -> None:
    """Each kind of parameters beside each kind of mask."""
    chance = torch.Generator().manual_seed(3)
    rows = len(PARAMS) * 14
    params = [PARAMS[row % len(PARAMS)] for row in range(rows)]
    logits = torch.randn(rows, VOCAB, generator=chance) * 2
    allowed = torch.rand(rows, VOCAB, generator=chance) < torch.rand(rows, 1, generator=chance)
    allowed[:, 20] = True
    allowed[::7] = True  # rows without a grammar
    allowed[3::7] = False
    allowed[3::7, 40] = True
    sampler = Sampler(rows, VOCAB, CPU, ops)
    sampler.introduce([init(row, [], **params[row]) for row in range(rows)])
    wanted = [expected(logits[row].tolist(), allowed[row].tolist(), params[row], row) for row in range(rows)]
    raw = logits.log_softmax(-1)
    sampled = sampler.sample(logits, range(rows), [0] * rows, lambda: pack_bitmask(allowed))
    assert sampled.tokens.tolist() == wanted
    assert sampled.logprobs is not None
    torch.testing.assert_close(sampled.logprobs.chosen, raw[torch.arange(rows), sampled.tokens])
    assert torch.equal(sampled.logprobs.top_ids[:, 0], raw.argmax(-1))


def test_a_mask_that_allows_nothing_gives_nothing(ops: SamplingOps) -> None:
    sampler = Sampler(2, VOCAB, CPU, ops)
    sampler.introduce([init(0, [], temperature=1.0), init(1, [], temperature=0.0)])
    masks = pack_bitmask(torch.zeros(2, VOCAB, dtype=torch.bool))
    assert sampler.sample(torch.randn(2, VOCAB), [0, 1], [0, 0], lambda: masks).tokens.tolist() == [-1, -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_suppressed_id_is_better_than_none_under_a_grammar(ops: SamplingOps, temperature: float) -> None:
    allowed = torch.zeros(3, VOCAB, dtype=torch.bool)
    allowed[:, 7] = True
    allowed[1:, 8] = True
    given = [
        init(slot, [7, 9], None if slot == 2 else GRAMMAR, temperature=temperature, min_new_tokens=3)
        for slot in range(3)
    ]
    sampler = Sampler(3, VOCAB, CPU, ops)
    sampler.introduce(given)
    logits = torch.zeros(3, VOCAB)
    logits[:, 7] = 60.0
    masks = pack_bitmask(allowed)
    assert sampler.sample(logits.clone(), [0, 1, 2], [0] * 3, lambda: masks).tokens.tolist() == [7, 8, 8]
    assert sampler.sample(logits.clone(), [0, 1, 2], [3] * 3, lambda: masks).tokens.tolist() == [7, 7, 7]


def test_tokens_given_without_sampling_are_counted(ops: SamplingOps) -> None:
    sampler = Sampler(2, VOCAB, CPU, ops)
    sampler.introduce([init(slot, [], temperature=0.0, frequency_penalty=1.0) for slot in range(2)])
    sampler.count(1, [4, 4, 5])
    logits = torch.zeros(2, VOCAB)
    logits[:, 4], logits[:, 5], logits[:, 6] = 3.0, 2.5, 2.0
    assert sampler.sample(logits, [0, 1], [3, 3]).tokens.tolist() == [4, 6]


def test_tokens_given_while_a_step_makes_room_for_counts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a step may run, in a thread of its own, while the host takes the result of the one before."""
    sampler = Sampler(5, VOCAB, CPU)
    given = [init(slot, [], temperature=0.0, frequency_penalty=1.0) for slot in range(5)]
    sampler.introduce(given[:1])
    join = torch.cat

    def taking_a_result(*parts: Any) -> torch.Tensor:
        joined = join(*parts)
        if len(taken) < 2:
            sampler.count(0, [4])
            taken.append(4)
        return joined

    taken: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", taking_a_result)
        sampler.introduce(given[1:])
    assert taken == [4, 4]
    logits = torch.zeros(1, VOCAB)
    logits[:, 4], logits[:, 5] = 3.0, 1.5
    assert sampler.sample(logits, [0], [2]).tokens.tolist() == [5]
