"""Random arrivals, lengths, aborts, choices, tiny memories; all invariants checked after each of thousands of steps."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.protocol.messages import AbortReq
from tercet.protocol.values import FinishType
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.testing import Driver, request, small_capacity


@pytest.mark.parametrize("overlap", [0, 1])
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(PolicyName),
    radix=st.booleans(),
    page_size=st.sampled_from([1, 4, 16]),
    pages=st.integers(12, 60),
    slots=st.integers(1, 8),
    budget=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_choice_gets_its_tokens_and_one_final_answer(
    overlap: int, seed: int, policy: PolicyName, radix: bool, page_size: int, pages: int, slots: int, budget: int
) -> None:
    chance = random.Random(seed)
    capacity = small_capacity(pages=max(pages // page_size, 4), page_size=page_size, slots=slots)
    config = CoreConfig(policy=policy, radix_cache=radix, token_budget=budget, patience=8, max_queued=40)
    driver = Driver(capacity, config, overlap=overlap)
    longest = min(driver.core.memory.tokens, capacity.context_length)
    prefixes = [[chance.randrange(1, 50) for _ in range(chance.randrange(1, longest))] for _ in range(3)]
    sent, aborted = {}, set()
    for number in range(60):
        rid = f"r{number}"
        prompt = chance.choice(prefixes)[: chance.randrange(1, longest)] + [
            chance.randrange(1, 50) for _ in range(chance.randrange(0, 5))
        ]
        wanted = request(
            rid,
            prompt,
            n=chance.choice([1, 1, 2, 4]),
            max_new_tokens=chance.randrange(0, 30),
            ignore_eos=chance.random() < 0.5,
            priority=chance.randrange(3),
            salt=chance.choice(["", "", "tenant"]),
        )
        sent[rid] = (prompt, wanted)
        driver.send(wanted)
        for _ in range(chance.randrange(6)):
            driver.step()
        if chance.random() < 0.3:
            victim = chance.choice(list(sent))
            aborted.add(victim)
            indices = [0] if chance.random() < 0.3 else []
            driver.send(AbortReq(rid=victim, indices=indices))
    driver.run()
    driver.assert_empty()
    for rid, (prompt, wanted) in sent.items():
        if rid in driver.rejected:
            assert (rid, 0) not in driver.output
            continue
        for index in range(wanted.sampling.n):
            finish = driver.finishes[rid, index]
            full = driver.expected(prompt, wanted.sampling.max_new_tokens, index)
            if wanted.sampling.ignore_eos:
                full = driver.output[rid, index]
            if finish.type == FinishType.ABORT:
                assert rid in aborted
                assert driver.output[rid, index] == full[: len(driver.output[rid, index])]
            else:
                assert driver.output[rid, index] == full
