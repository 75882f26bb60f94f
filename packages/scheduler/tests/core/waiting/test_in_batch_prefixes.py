"""Of choices that begin alike and come together, one computes the beginning."""

import time
from typing import Any

import pytest

from tercet.protocol.messages.messages import AbortReq, TokenizedGenerateReqInput
from tercet.protocol.messages.values import LogprobParams
from tercet.scheduler.core import planner
from tercet.scheduler.core.cache.prefix_cache import RadixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, PeerBlocked
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.waiting.in_flight_prefixes import InFlightPrefixes
from tercet.scheduler.testing import Driver, request, small_capacity

SHARED = [7 * place % 50 for place in range(96)]
PAGE = 4
SCORED = LogprobParams(prompt=True)


def asked(rid: str, tail: int = 8, **options: Any) -> TokenizedGenerateReqInput:
    return request(rid, [*SHARED, *([ord(rid) % 50] * tail)], max_new_tokens=3, ignore_eos=True, **options)


def driver(budget: int = 512, overlap: int = 0, **config: Any) -> Driver:
    return Driver(
        small_capacity(pages=400, page_size=PAGE, slots=8), CoreConfig(token_budget=budget, **config), overlap=overlap
    )


def computed(run: Driver) -> int:
    """Tokens of all steps."""
    return sum(row.count for plan in run.plans for row in plan.rows)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("budget", [512, 40])
def test_the_first_computes_it_for_all(budget: int, overlap: int) -> None:
    run = driver(budget, overlap)
    requests = [asked(rid) for rid in "abcd"]
    run.send(*requests)
    run.run()
    assert computed(run) == len(SHARED) + 4 * 8 + 4 * 2  # the beginning, what follows it, all but the last output
    for wanted in requests:
        assert run.output[wanted.rid, 0] == run.answer(wanted, 0)
    run.assert_empty()


def test_who_comes_while_it_is_computed_waits_too() -> None:
    run = driver(budget=40)
    run.send(asked("a"))
    run.step()
    run.send(asked("b"))
    run.run()
    assert computed(run) == len(SHARED) + 2 * 8 + 2 * 2


def test_what_has_nothing_in_common_starts_beside_it() -> None:
    run = driver()
    run.send(asked("a"), asked("b"), request("c", [3] * 90, max_new_tokens=3))
    run.step()
    assert [row.count for row in run.plans[0].rows] == [len(SHARED) + 8, 90]


@pytest.mark.parametrize(
    ("config", "options"), [({"radix_cache": False}, {}), ({}, {"salt": "another"}), ({}, {"logprobs": SCORED})]
)
def test_nobody_waits_for_what_it_could_not_use(config: dict[str, Any], options: dict[str, Any]) -> None:
    run = driver(**config)
    run.send(asked("a"), asked("b", **options))
    run.step()
    assert [row.count for row in run.plans[0].rows] == [len(SHARED) + 8] * 2


def test_nobody_waits_for_ever() -> None:
    run = driver(overlap=1, max_skips=1)
    run.send(asked("a"), asked("b"), request("c", [3] * 90, max_new_tokens=3))  # which goes before b
    run.run()
    assert [row.count for row in run.plans[1].rows] == [1, 1, len(SHARED) + 8]


def test_nobody_waits_for_a_prompt_that_goes_on_for_much_longer() -> None:
    run = driver(budget=40)
    run.send(asked("a", tail=140))
    run.step()
    run.send(asked("b", tail=2))
    run.step()
    assert [row.count for row in run.plans[1].rows] == [20, 20]


def test_nobody_waits_for_a_step_to_be_spared_little() -> None:
    run = driver()
    run.send(*(request(rid, SHARED[:60], max_new_tokens=3) for rid in "ab"))
    run.step()
    assert [row.count for row in run.plans[0].rows] == [60, 60]


def test_nobody_waits_for_one_whose_peer_listens_no_more() -> None:
    run = driver(budget=40)
    run.send(asked("a", detokenizer="detokenizer-slow"))
    run.step()
    run.send(PeerBlocked("detokenizer-slow"))
    wanted = asked("b")
    run.send(wanted)
    run.run()
    assert run.output["b", 0] == run.answer(wanted, 0)


def test_nobody_waits_for_one_that_was_aborted_in_flight() -> None:
    core = driver(budget=40).core
    core.handle(Arrival("frontend-0", asked("a")))
    assert core.schedule() is not None
    core.handle(Arrival("frontend-0", AbortReq(rid="a")), Arrival("frontend-0", asked("b")))
    plan = core.schedule()
    assert plan is not None
    assert [row.count for row in plan.rows] == [40]


def test_a_step_looks_at_so_many_that_wait_for_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LONGEST_MEASURED", 3)
    run = driver()
    run.send(*(asked(rid) for rid in "abcdef"), request("g", [3] * 10, max_new_tokens=3))
    run.step()
    assert [row.count for row in run.plans[0].rows] == [len(SHARED) + 8]
    run.run()
    assert len(run.finishes) == 7


def test_to_compare_long_prompts_that_begin_alike_takes_no_time() -> None:
    """Where all know one long beginning, each that waits is compared with all that were admitted before it."""
    head = [7 * place % 50 for place in range(50_000)]
    cache = RadixCache(page_size=1)
    tails = [[own] * 100 for own in range(40)] + [[own] * 101 for own in range(20)]
    reqs = [Req(request("a", [*head, *tail]), "frontend-0", 0, (), own) for own, tail in enumerate(tails)]
    running, others, alike = reqs[:20], reqs[20:40], reqs[40:]
    cache.insert(reqs[0].salt, reqs[0].cache_key(len(head)), [list(range(len(head)))])
    for req in running:
        req.computed = len(head)
    coming = InFlightPrefixes(running, KVMemory(small_capacity(page_size=1), CoreConfig()))
    began = time.process_time()
    assert not any(coming.is_worth_waiting(req, cache) for req in others)
    assert all(coming.is_worth_waiting(req, cache) for req in alike)
    assert time.process_time() - began < 0.5  # it was 2 s, and for 300 choices a minute and a half
