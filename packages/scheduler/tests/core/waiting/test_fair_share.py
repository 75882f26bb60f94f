"""Tenants that share a scheduler: whose turn it is, what each is charged for, and that nobody saves up."""

import io
import random
from typing import Any

import pytest

from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import Grammar, GrammarKind, LoRAAdapter, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.events import GrammarPending, PeerBlocked
from tercet.scheduler.core.waiting.fair_share import MOST_SKIPPED, Account, FairShare
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, request, small_capacity

FAIR = PolicyName.FAIR


def driver(*, slots: int = 4, pages: int = 400, overlap: int = 0, adapters: int = 0, **config: Any) -> Driver:
    """A fair scheduler with room."""
    capacity = small_capacity(pages=pages, slots=slots, context_length=1024, adapters=adapters, grammars="some 1")
    return Driver(capacity, CoreConfig(**{"policy": FAIR, "token_budget": 64, **config}), overlap=overlap)


def accounts(run: Driver) -> dict[str, Account]:
    assert isinstance(run.core.policy, FairShare)
    return run.core.policy.accounts.by_tenant


def served(run: Driver) -> dict[str, int]:
    return {name: account.served for name, account in accounts(run).items()}


def admitted(run: Driver, since: int = 0) -> list[int]:
    """First tokens of the prompts in the order in which they were introduced: tests give each tenant its own."""
    return [init.tokens[0] for plan in run.plans[since:] for init in plan.introduce]


def ask(run: Driver, rid: str, prompt: list[int], tenant: str, max_new_tokens: int = 4, **more: Any) -> None:
    run.send(request(rid, prompt, tenant=tenant, max_new_tokens=max_new_tokens, ignore_eos=True, **more))


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("n", [1, 100])
@pytest.mark.parametrize("policy", [FAIR, PolicyName.FCFS, PolicyName.LPM])
def test_a_flood_of_one_tenant_lets_another_s_request_by(policy: PolicyName, n: int, overlap: int) -> None:
    run = driver(policy=policy, overlap=overlap)
    for number in range(200 // n):
        ask(run, f"flood {number}", [7, number % 50, number // 50] * 3, "a", 8, n=n)
    for _ in range(5):
        run.step()
    before = len(run.plans)
    ask(run, "late", [9, 1, 2], "b", 2)
    run.run()
    place = admitted(run, before).index(9)
    if policy is FAIR:
        assert place == 0, "the next place is its own"
        assert list(run.finishes).index(("late", 0)) < 20
    else:
        assert place > 100
    assert len(run.finishes) == 201
    run.assert_empty()


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize(("n", "queued"), [(1, {"a": 12, "b": 6}), (4, {"a": 12, "b": 8})])
def test_a_flood_leaves_places_in_the_queue(policy: PolicyName, n: int, queued: dict[str, int]) -> None:
    """As many as it takes, under every policy. Where choices follow others they count, too."""
    run = driver(max_queued=24, policy=policy)
    for tenant, most in queued.items():
        for number in range(24 // n):
            ask(run, f"{tenant}{number}", [7, number], tenant, n=n)
            assert (f"{tenant}{number}" in run.rejected) is ((number + 1) * n > most)
    assert {tenant: sum(req.tenant == tenant for req in run.core.roster) for tenant in "ab"} == queued
    assert {(each.code, each.retry) for each in run.rejected.values()} == {("overloaded", True)}
    ask(run, "late", [9, 1], "c", n=n)
    assert "late" not in run.rejected
    run.run()
    assert len(run.finishes) == sum(queued.values()) + n
    ask(run, "again", [7, 1], "a", n=12)
    assert "again" not in run.rejected, "places are free again"
    run.run()
    run.assert_empty()


@pytest.mark.parametrize("policy", PolicyName)
def test_without_keys_the_whole_queue_may_be_filled(policy: PolicyName) -> None:
    run = driver(max_queued=6, policy=policy)
    for number in range(8):
        ask(run, f"r{number}", [7, number], "")
    assert [*run.rejected] == ["r6", "r7"]
    run.run()
    run.assert_empty()


def test_what_resumes_finds_a_place_whoever_s_it_is() -> None:
    run = driver(max_queued=2)
    for name in "ab":
        ask(run, name, [7, 8], "a")
    assert [*run.rejected] == ["b"]
    run.send(request("c", [7, 8], tenant="a", attempt=1, resume=[Resume(0)]))
    assert "c" not in run.rejected


def test_tenants_take_turns_by_what_they_cost() -> None:
    run = driver(slots=1)
    for number in range(12):
        ask(run, f"a{number}", [7, number] * 15, "a", 1)
        ask(run, f"b{number}", [8, number] * 4, "b", 1)
    for _ in range(16):
        run.step()
    turns = admitted(run)
    assert turns.count(7) == 4  # each costs 32, as much as three and a bit of the others, which cost 10
    assert max(len(run) for run in "".join("ab"[first - 7] for first in turns).split("a")) <= 4


def test_what_is_in_the_prefix_cache_costs_nothing() -> None:
    run = driver(slots=1)
    prompt = [7] * 41
    ask(run, "first", prompt, "a", 1)
    run.run()
    assert served(run) == {"a": 41 + 2}
    ask(run, "again", prompt, "a", 1)
    run.run()
    assert served(run) == {"a": 41 + 2 + 1 + 2}


def test_a_shared_prompt_is_charged_once_and_each_output_alone() -> None:
    run = driver(slots=8)
    ask(run, "many", [7, 1, 2, 3, 4, 5], "a", 5, n=4)
    run.run()
    assert run.core.counters.forks == 3
    recomputed = 3  # the last token of a prompt that is shared
    assert served(run) == {"a": 6 + recomputed + 2 * 4 * 5}


@pytest.mark.parametrize("overlap", [0, 1])
def test_wrong_guesses_cost_their_tenant_nothing(overlap: int) -> None:
    run = driver(overlap=overlap, draft_rows=8)
    prompt = [7, 3, 9]
    truth = run.answer(request("", prompt, max_new_tokens=30, ignore_eos=True))
    guess = [token if place % 3 else (token + 1) % 50 for place, token in enumerate(truth)]
    ask(run, "guessed", prompt, "a", 30, prediction=guess)
    run.run()
    counters = run.core.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert served(run) == {"a": 3 + 2 * 30}


def test_what_a_retracted_choice_computes_again_costs_its_tenant_nothing() -> None:
    run = driver(pages=16, reserve=0.0, reserve_floor=0.0, radix_cache=False)
    for tenant, first in (("a", 7), ("b", 8), ("c", 9)):
        ask(run, tenant, [first, 1, 2], tenant, 40)
    run.run()
    assert run.core.counters.retractions > 0
    assert {name: account.served for name, account in accounts(run).items()} == dict.fromkeys("abc", 3 + 2 * 40)


def test_a_retracted_choice_goes_before_whoever_was_served_less() -> None:
    run = driver(slots=2, pages=24, reserve=0.0, reserve_floor=0.0)
    ask(run, "poor", [7] * 3, "a", 60)
    ask(run, "rich", [8] * 3, "c", 60, priority=1)
    while not run.core.counters.retractions:
        run.step()
    before = len(run.plans)
    ask(run, "late", [9] * 3, "b", 4)
    run.run()
    assert admitted(run, before) == [7, 9]


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("policy", [FAIR, PolicyName.FCFS])
def test_a_flood_that_comes_back_after_a_crash_takes_turns(policy: PolicyName, n: int) -> None:
    """Only what has output, which are as many as can run, goes first."""
    run = driver(policy=policy, slots=2)
    ask(run, "new", [9, 1, 2], "b", 2)
    for number in range(40 // n):
        resume = [Resume(index) for index in range(n)]
        ask(run, f"flood {number}", [7, number], "a", 8, n=n, attempt=1, resume=resume)
    began = [Resume(0, pack_ints([3, 4]))]
    run.output["begun", 0] = [3, 4]
    ask(run, "begun", [8, 1, 2], "a", 4, attempt=1, resume=began)
    run.run()
    order = admitted(run)
    if policy is FAIR:
        assert order.index(8) == 0
        assert order.index(9) == 1
    else:
        assert order.index(9) >= 40
    assert len(run.finishes) == 42
    run.assert_empty()


def test_a_resumed_choice_goes_first_and_pays_for_recomputation() -> None:
    run = driver(slots=1)
    ask(run, "running", [8], "b", 9)
    run.step()
    ask(run, "waiting", [9], "b", 1)
    known = run.expected([7, 1, 2], 6)
    run.output["resumed", 0] = known
    resume = [Resume(0, pack_ints(known))]
    ask(run, "resumed", [7, 1, 2], "a", 8, attempt=1, resume=resume)
    run.run()
    assert admitted(run) == [8, 7, 9]
    assert served(run)["a"] - (3 + 6 + 2 * 2) in range(1 + 2 * 9 + 1)  # lifted to what "b" had then, and no more


@pytest.mark.parametrize("streams", [0, 1])
def test_nobody_saves_up_while_it_asks_for_little(streams: int) -> None:
    """Also where something of it runs all the time."""
    run = driver(slots=4)
    ask(run, "early", [8] * 5, "b", 600 if streams else 1)
    for number in range(150):
        ask(run, f"a{number}", [7, number % 50, number // 50, 1, 2], "a", 3)
    while len(run.finishes) < 100:
        run.step()
    assert served(run)["a"] > 4 * served(run)["b"]
    for number in range(40):
        ask(run, f"b{number}", [8, number, 0, 1, 2], "b", 3)
    before = len(run.plans)
    assert served(run)["b"] == served(run)["a"]
    while len(run.plans) < before + 40:
        run.step()
    turns = admitted(run, before)
    assert len(turns) > 20
    assert turns.count(7) - turns.count(8) in (
        range(4, 12) if streams else range(-2, 3)
    )  # a stream is charged for, too
    assert abs(served(run)["a"] - served(run)["b"]) <= 5 + 4 * 2 * 3


def test_where_nobody_waits_a_newcomer_begins_where_the_last_to_wait_is() -> None:
    run = driver(slots=8)
    ask(run, "a", [7] * 5, "a", 20)
    run.step()
    ask(run, "b", [8] * 5, "b", 1)
    level = served(run)["a"]
    assert served(run)["b"] == level > 0
    run.run()


def test_accounts_of_tenants_that_are_gone_are_dropped() -> None:
    run = driver(slots=2)
    for number in range(300):
        ask(run, f"r{number}", [number % 50, 1, 2], f"tenant {number}", 2)
        if number % 3 == 2:
            run.run()
        assert len(accounts(run)) < 20
    run.run()
    ask(run, "last", [1], "one more", 1)
    run.run()
    assert len(accounts(run)) <= 2


def test_who_was_given_more_than_those_that_wait_is_not_forgotten() -> None:
    run = driver(slots=1)
    ask(run, "a0", [7] * 60, "a", 60)
    run.step()
    for number in range(6):
        ask(run, f"b{number}", [8, number], "b", 1)
    while ("a0", 0) not in run.finishes:
        run.step()
    ask(run, "a1", [7, 1], "a", 1)
    ask(run, "b6", [8, 6], "b", 1)
    run.run()
    assert admitted(run) == [7] + [8] * 7 + [7]


def test_an_aborted_choice_leaves_nothing_on_an_account() -> None:
    run = driver(slots=1)
    ask(run, "a", [7] * 100, "a", 5)
    ask(run, "b", [8] * 100, "b", 5, n=3)
    run.step()
    run.send(AbortReq(rid="a"), AbortReq(rid="b"))
    run.run()
    assert all((account.waiting, account.begun) == (0, 0) for account in accounts(run).values())
    run.assert_empty()


def test_waiting_for_another_s_turn_ages_nobody() -> None:
    """Otherwise all that a flood asked for would go first as soon as it had waited long enough."""
    run = driver(slots=1, max_skips=4)
    for number in range(60):
        ask(run, f"a{number}", [7, number % 50, 3], "a", 1)
    for number in range(60):
        ask(run, f"b{number}", [8, number % 50, 3], "b", 1)
        run.step()
    turns = admitted(run)
    assert abs(turns.count(7) - turns.count(8)) <= 1
    assert not any(req.times_skipped for req in run.core.waiting)


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_whose_adapter_finds_no_place_gets_its_turn(tenant: str) -> None:
    """Whoever's it is. Those with the adapter at hand would go by for ever."""
    mine, yours = (LoRAAdapter(f"/adapters/{name}", name * 64) for name in "ab")
    run = driver(slots=2, adapters=1, max_skips=6)
    ask(run, "a0", [7], "a", 8, lora=mine)
    run.step()
    ask(run, "wanted", [8], tenant, 2, lora=yours)
    for number in range(60):
        ask(run, f"a{number + 1}", [7, number % 50], "a", 8, lora=mine)
        run.step()
        run.step()
        if ("wanted", 0) in run.finishes:
            break
    assert number < 50
    run.run()


def test_only_the_first_of_a_tenant_s_loses_its_patience() -> None:
    """Or all that wait for an adapter would in the end go before everybody else's."""
    mine, yours = (LoRAAdapter(f"/adapters/{name}", name * 64) for name in "ab")
    run = driver(slots=2, adapters=1, max_skips=6)
    ask(run, "a0", [7], "a", 200, lora=mine)
    run.step()
    for number in range(20):
        ask(run, f"b{number}", [8, number], "b", 1, lora=yours)
    for number in range(12):
        ask(run, f"c{number}", [9, number], "c", 1)
    for _ in range(12):
        run.step()
    aged = [req.times_skipped for req in run.core.waiting if req.tenant == "b"]
    assert max(aged) >= 6
    assert sorted(aged)[:-1] == [0] * 19
    run.run()


def test_choices_waiting_for_their_own_prompt_block_no_others() -> None:
    """They are put off, each time by a look at them, of which a step takes a limited number."""
    run = driver(slots=8, token_budget=16)
    for number in range(200):
        ask(run, f"a{number}", [*[7] * 400, number % 50, number // 50], "a", 1)
    run.step()
    ask(run, "b0", [8], "b", 40)  # so that "a" has been given less, and goes first
    run.step()
    before = len(run.plans)
    ask(run, "b", [9, 1], "b", 2)
    for _ in range(4):
        run.step()
    assert admitted(run, before) == [9]
    assert ("b", 0) in run.finishes


def test_what_is_held_up_leaves_its_tenant_its_turn() -> None:
    run = driver(slots=1)
    grammar = Grammar(GrammarKind.REGEX, "a*")
    run.send(GrammarPending(grammar), PeerBlocked("detokenizer-slow"))
    ask(run, "running", [7], "a", 3)
    run.step()
    ask(run, "b0", [8], "b", 1, grammar=grammar)
    ask(run, "b1", [8, 1], "b", 1, detokenizer="detokenizer-slow")
    ask(run, "a", [7, 1], "a", 1)
    ask(run, "b2", [9], "b", 1)
    run.run()
    assert admitted(run) == [7, 9, 7]


def test_a_tenant_with_too_many_skips_loses_its_turn_for_the_step() -> None:
    run = driver()
    for tenant, count in {"a": 3, "b": MOST_SKIPPED + 3}.items():
        for number in range(count):
            ask(run, f"{tenant}{number}", [1], tenant)
    accounts(run)["a"].served = 1
    looked_at = [req.tenant for req in run.core.policy.order(list(run.core.waiting), run.core.memory.cache)]
    assert looked_at == ["b"] * MOST_SKIPPED + ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize("overlap", [0, 1])
def test_every_plan_is_derived_again_from_the_log(overlap: int) -> None:
    run = driver(overlap=overlap)
    log = io.BytesIO()
    core = run.core
    run.core = RecordingScheduler(core, LogFile(log).record)  # type: ignore[assignment]
    run.check = lambda: None  # type: ignore[method-assign] # which looks into the core itself
    chance = random.Random(5)
    for number in range(60):
        tenant = chance.choice("aab")
        prompt = [ord(tenant) % 50, *(chance.randrange(50) for _ in range(chance.randrange(1, 30)))]
        ask(run, f"r{number}", prompt, tenant, chance.randrange(1, 9), n=chance.choice([1, 3]))
        run.step()
    run.run()
    log.seek(0)
    compared = [logged == derived for _, logged, derived in replay(read_events(log))]
    assert len(compared) > 60
    assert all(compared)
