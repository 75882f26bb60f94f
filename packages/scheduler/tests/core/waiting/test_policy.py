"""Orders of admission, and that nobody waits for ever under any of them."""

import pytest

from tercet.protocol.messages.messages import AbortReq, FlushCacheReq
from tercet.scheduler.core.cache.prefix_cache import RadixCache
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.testing import Driver, request, small_capacity


def admitted(run: Driver) -> list[int]:
    """Prompt lengths in the order their requests were introduced: tests give each request its own."""
    return [init.prompt_tokens for plan in run.plans for init in plan.introduce]


def driver(policy: PolicyName, **options: int) -> Driver:
    config = CoreConfig(policy=policy, token_budget=64, **options)  # type: ignore[arg-type]
    return Driver(small_capacity(pages=64, slots=1), config)


def test_first_come_first_served() -> None:
    run = driver(PolicyName.FCFS)
    for length in (5, 3, 9):
        run.send(request(f"r{length}", [1] * length, max_new_tokens=1))
    run.run()
    assert admitted(run) == [5, 3, 9]


def test_priority_first_then_arrival() -> None:
    run = driver(PolicyName.PRIORITY)
    for length, priority in ((5, 0), (3, 2), (9, 2), (4, 1)):
        run.send(request(f"r{length}", [1] * length, max_new_tokens=1, priority=priority))
    run.run()
    assert admitted(run) == [3, 9, 4, 5]


def test_followers_wait_for_requests_of_a_higher_priority() -> None:
    run = Driver(small_capacity(pages=64, slots=4), CoreConfig(policy=PolicyName.PRIORITY, token_budget=64))
    run.send(request("many", [1] * 5, n=8, max_new_tokens=4, ignore_eos=True))
    run.step()
    run.send(request("urgent", [2] * 3, max_new_tokens=4, ignore_eos=True, priority=9))
    run.step()
    assert admitted(run) == [5, 3, 5, 5]
    run.run()
    assert len(run.finishes) == 9


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("lost", [None, 0])
def test_choices_that_followed_another_go_before_who_came_later(policy: PolicyName, lost: int | None) -> None:
    """Also where the first of them is aborted while it computes their prompt."""
    run = Driver(small_capacity(pages=64, slots=1), CoreConfig(policy=policy, token_budget=4))
    run.send(request("many", [1] * 5, n=3, max_new_tokens=2, ignore_eos=True))
    run.step()
    run.send(request("later", [2] * 3, max_new_tokens=2, ignore_eos=True))
    if lost is not None:
        run.send(AbortReq(rid="many", indices=[lost]))
    run.run()
    assert admitted(run) == [5, 5, 5, 3]


def test_an_heir_of_a_choice_that_ran_queues_as_it_would_have() -> None:
    run = Driver(small_capacity(pages=64, slots=1), CoreConfig(policy=PolicyName.PRIORITY, token_budget=4))
    run.send(request("many", [1] * 5, n=3, max_new_tokens=2, ignore_eos=True))
    run.step()
    run.send(request("urgent", [2] * 3, max_new_tokens=2, ignore_eos=True, priority=9))
    run.send(AbortReq(rid="many", indices=[0]))
    run.run()
    assert admitted(run) == [5, 3, 5, 5]


def test_choices_lose_their_patience_together() -> None:
    config = CoreConfig(policy=PolicyName.PRIORITY, token_budget=64, max_skips=10)
    run = Driver(small_capacity(pages=64, slots=1), config)
    run.send(request("urgent", [2] * 3, max_new_tokens=1, priority=9))
    run.send(request("many", [1] * 5, n=3, max_new_tokens=1))
    for _ in range(20):
        run.send(request(f"u{len(run.plans)}", [2] * 3, max_new_tokens=1, priority=9))
        run.step()
    assert admitted(run)[11:14] == [5, 5, 5]


def test_the_longest_cached_prefix_goes_first() -> None:
    run = driver(PolicyName.LPM)
    run.send(request("warm", [*range(1, 13)], max_new_tokens=1))
    run.run()
    run.send(request("cold", [40] * 5, max_new_tokens=1))
    run.send(request("some", [*range(1, 6), 49], max_new_tokens=1))
    run.send(request("most", [*range(1, 13), 49], max_new_tokens=1))
    run.run()
    assert admitted(run) == [12, 13, 6, 5]


class Counting(RadixCache):
    """Counts how often it is asked."""

    asked = 0

    def measure(self, salt: str, key: bytes) -> int:
        self.asked += 1
        return super().measure(salt, key)


def test_waiting_prompts_are_matched_once_per_change_of_the_cache() -> None:
    run = Driver(small_capacity(pages=16, page_size=4), CoreConfig(token_budget=64))
    cache = run.core.memory.cache = Counting(page_size=4)
    run.send(request("warm", [5] * 9, max_new_tokens=1))
    run.run()
    run.send(request("big", [1] * 20, max_new_tokens=20, ignore_eos=True))
    run.step()
    for number in range(3):
        run.send(request(f"w{number}", [10 + number] * 40, max_new_tokens=1))
    for _ in range(10):
        assert run.step()
    assert len(run.core.waiting) == 3
    assert cache.asked == 3
    run.send(request("late", [5] * 41, max_new_tokens=1))
    run.step()
    assert cache.asked == 4
    run.send(FlushCacheReq(id="f"))
    run.step()
    assert cache.asked == 8
    run.run()
    assert len(run.finishes) == 6


def test_who_waits_for_memory_is_ordered_by_what_is_cached_now() -> None:
    run = Driver(small_capacity(pages=16, page_size=4), CoreConfig(token_budget=8))
    favoured = [7] * 12
    run.send(request("running", [*favoured, 8], max_new_tokens=30, ignore_eos=True))
    run.step()
    run.send(request("cold", [40] * 45, max_new_tokens=1), request("favourite", [*favoured, *[9] * 32]))
    run.run()
    assert admitted(run) == [13, 44, 45]


@pytest.mark.parametrize("policy", [PolicyName.PRIORITY, PolicyName.LPM])
def test_a_request_passed_over_long_enough_goes_first(policy: PolicyName) -> None:
    run = driver(policy, max_skips=10)
    favoured = [*range(1, 13)]
    run.send(request("warm", favoured, max_new_tokens=1))
    run.run()
    run.send(request("old", [40] * 5, max_new_tokens=1))
    for number in range(200):
        run.send(request(f"f{number}", [*favoured, 1 + number % 40], max_new_tokens=1, priority=5))
        run.step()
        if ("old", 0) in run.finishes:
            break
    assert 8 <= number <= 12


@pytest.mark.parametrize("policy", PolicyName)
def test_a_large_request_is_not_starved_by_small_ones(policy: PolicyName) -> None:
    config = CoreConfig(policy=policy, token_budget=64, max_skips=10)
    run = Driver(small_capacity(pages=16, slots=8), config)
    for number in range(400):
        run.send(request(f"s{number}", [1 + number % 49] * 7, max_new_tokens=6, ignore_eos=True, priority=1))
        if number == 5:
            run.send(request("large", [3] * 50, max_new_tokens=10, ignore_eos=True))
        run.step()
        if ("large", 0) in run.finishes:
            return
    raise AssertionError("the large request waited for 395 steps")
