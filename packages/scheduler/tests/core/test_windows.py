"""Scheduling of models with sliding windows: pages outside the window are given up, and prefixes are found without."""

import msgspec
import pytest

from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import Grammar, GrammarKind, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.plan import CacheGroup
from tercet.scheduler.core.window_pages import WindowPages, window_pages
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

WINDOW, BUDGET, SLOTS = 16, 32, 2
LEAST = window_pages(WINDOW, 4, SLOTS, BUDGET)
SHARED = [1 + number % 40 for number in range(120)]


def driver(spare: int, *, radix_cache: bool = True, slots: int = SLOTS) -> Driver:
    """Return a scheduler whose window pages are the least number and some more."""
    groups = [CacheGroup("full", 1000), CacheGroup("window", LEAST + spare, WINDOW)]
    capacity = msgspec.structs.replace(small_capacity(slots=slots, context_length=4096), groups=groups)
    return Driver(capacity, CoreConfig(token_budget=BUDGET, radix_cache=radix_cache), overlap=1)


def windows_of(run: Driver) -> WindowPages:
    assert run.core.memory.windows is not None
    return run.core.memory.windows


def cached_by(run: Driver, rid: str, prompt: list[int], *, n: int = 1, max_new_tokens: int = 8) -> int:
    """Return the prompt tokens that a request finds in the cache. Its answers must be right."""
    before = run.core.counters.cached_tokens
    message = request(rid, prompt, n=n, max_new_tokens=max_new_tokens, ignore_eos=True)
    run.send(message)
    run.run()
    assert all(run.output[rid, index] == run.answer(message, index) for index in range(n))
    return run.core.counters.cached_tokens - before


@pytest.mark.parametrize("radix_cache", [True, False])
def test_a_context_far_longer_than_all_window_pages_is_served(radix_cache: bool) -> None:
    run = driver(0, radix_cache=radix_cache)
    assert 4 * LEAST < 1000
    assert cached_by(run, "long", [1 + number % 40 for number in range(1000)], max_new_tokens=1000) == 0
    assert radix_cache or len(windows_of(run).pool.free_pages) == LEAST


def test_the_end_of_a_text_is_found_when_pages_inside_texts_were_given_up() -> None:
    run = driver(20)
    first = [41, *SHARED]
    assert cached_by(run, "first", first) == 0
    for number in range(2):
        assert cached_by(run, f"other {number}", [42 + number, *SHARED]) == 0
    cache = windows_of(run).cache
    assert cache is not None
    held = sum(len(node.window) for node in cache.with_window)
    assert held < 3 * len(first) // 4, "some pages were given up"
    assert cached_by(run, "again", first) == 120


def test_the_second_prompt_that_branches_off_brings_the_window_there() -> None:
    run = driver(0)
    assert cached_by(run, "first", [*SHARED, *[41] * 200]) == 0
    assert cached_by(run, "second", [*SHARED, *[42] * 60]) == 0, "the pages before the branch were given up"
    assert [cached_by(run, f"later {last}", [*SHARED, last, last]) for last in (43, 44, 45)] == [120, 120, 120]


def test_each_turn_of_a_chat_computes_its_own_tokens_only() -> None:
    run, history = driver(0), list(SHARED)
    for turn in range(12):
        history += [1 + turn, 2, 3, 4, 5]
        cached = cached_by(run, f"turn {turn}", history, max_new_tokens=10)
        assert turn == 0 or len(history) - cached <= 5 + 2 * run.core.memory.page_size
        history += run.output[f"turn {turn}", 0]


def test_choices_of_one_prompt_share_its_window() -> None:
    run = driver(0)
    assert cached_by(run, "r", [*SHARED, 7, 8, 9], n=4) == 3 * 120


def test_choices_wait_for_room_for_their_windows() -> None:
    run = driver(-1)
    messages = [request(f"r{number}", [number, *SHARED], max_new_tokens=50, ignore_eos=True) for number in range(1, 4)]
    run.send(*messages)
    running = 0
    while run.step():
        running = max(running, len(run.core.planner.running))
    assert running == 1, "the window of one choice fits"
    assert all(run.output[message.rid, 0] == run.answer(message) for message in messages)


def test_a_tenant_leaves_room_for_the_window_of_another() -> None:
    run = driver(10 * 6, slots=16)
    run.send(*(request(f"a{number}", SHARED, max_new_tokens=200, ignore_eos=True, tenant="a") for number in range(16)))
    for _ in range(40):
        run.step()
    assert len(run.core.planner.running) == 10
    run.send(request("b", [7, *SHARED], max_new_tokens=4, ignore_eos=True, tenant="b"))
    for _ in range(40):
        run.step()
    assert run.output["b", 0]
    run.run()


def test_a_group_too_small_for_a_window_is_refused() -> None:
    capacity, least = driver(0).core.capacity, window_pages(WINDOW, 4, 1, BUDGET)
    groups = [capacity.groups[0], CacheGroup("window", least - 1, WINDOW)]
    with pytest.raises(ValueError, match=f"{least - 1} pages do not hold a window of 16 tokens: {least} are needed"):
        KVMemory(msgspec.structs.replace(capacity, groups=groups), CoreConfig(token_budget=BUDGET))


def test_a_late_mask_at_the_end_of_a_page_gives_no_pages_to_other_tokens() -> None:
    """The last token of a published prompt is to be computed again when its choice is aborted."""
    groups = [CacheGroup("full", 500), CacheGroup("window", window_pages(5, 4, 3, BUDGET), 5)]
    shape = msgspec.structs.replace(small_capacity(slots=3, context_length=512, grammars="fake 1"), groups=groups)
    late = [True]
    executor = FakeExecutor(shape, grammar=lambda _: ((), False), defers=lambda *_: late[0])
    executor.late_masks.held_back = True
    run = Driver(shape, CoreConfig(token_budget=BUDGET), overlap=0, executor=executor)
    prompt = [*range(1, 25)]
    run.send(request("late", prompt, grammar=Grammar(GrammarKind.REGEX, ""), max_new_tokens=8, ignore_eos=True))
    for _ in range(3):
        run.step()
    late[0] = False
    for number in range(6):
        others = [[number + 1, other + 1, *SHARED[:60]] for other in range(2)]
        run.send(*(request(f"{each}", each, max_new_tokens=20, ignore_eos=True) for each in others))
        for _ in range(30):
            run.step()
    run.send(AbortReq(rid="late"))
    assert cached_by(run, "again", [*prompt, 45, 46]) <= 20


@pytest.mark.parametrize("page_size", [1, 4])
def test_accepted_drafts_do_not_outgrow_the_reserve(page_size: int) -> None:
    groups = [CacheGroup("full", 8000 // page_size), CacheGroup("window", window_pages(16, page_size, 4, 64), 16)]
    shape = msgspec.structs.replace(small_capacity(page_size=page_size, slots=4, context_length=2048), groups=groups)
    for steps in range(5, 14):
        run = Driver(shape, CoreConfig(token_budget=64, draft_rows=62, radix_cache=False), overlap=1)
        told = request("told", [1, 2, 3], max_new_tokens=500, ignore_eos=True)
        told = msgspec.structs.replace(told, prediction=pack_ints(run.answer(told)))
        others = [request(f"{number}", [5 + number, 7], max_new_tokens=300, ignore_eos=True) for number in range(2)]
        run.send(told, *others)
        for _ in range(steps):
            run.step()
        run.send(request("long", [9] * 900, max_new_tokens=2, ignore_eos=True))
        for _ in range(30):
            run.step()
        assert run.output["told", 0] == run.answer(told)[: len(run.output["told", 0])]
        assert run.core.counters.accepted_tokens > 0


def test_pages_of_an_aborted_prompt_are_free_for_the_next_one() -> None:
    """It published the prefix that it shares in this step, so pages of its own wait for the step's end."""
    groups = [CacheGroup("full", 115), CacheGroup("window", window_pages(8, 4, 2, 16), 8)]
    shape = msgspec.structs.replace(small_capacity(slots=2, context_length=512), groups=groups)
    run = Driver(shape, CoreConfig(token_budget=16), overlap=0)
    cached_by(run, "first", [*SHARED, *[41] * 200], max_new_tokens=4)
    run.send(request("second", [*SHARED, *[42] * 60], max_new_tokens=4, ignore_eos=True))
    for _ in range(9):
        run.step()
    assert not run.core.memory.deferred_free
    run.send(AbortReq(rid="second"))
    assert cached_by(run, "third", [43] * 400, max_new_tokens=4) == 0


@pytest.mark.parametrize(("budget", "window", "lengths"), [(15, 8, (134, 14)), (31, 3, (76, 1, 146))])
def test_a_plan_in_each_pipeline_stage_finds_its_pages(budget: int, window: int, lengths: tuple[int, ...]) -> None:
    groups = [CacheGroup("full", 800), CacheGroup("window", window_pages(window, 1, 1, budget, stages=2), window)]
    shape = msgspec.structs.replace(small_capacity(page_size=1, slots=6, context_length=256), groups=groups)
    run = Driver(shape, CoreConfig(token_budget=budget, stages=2, radix_cache=False), overlap=2)
    messages = [
        request(f"{number}", [1 + number] * length, max_new_tokens=40, ignore_eos=True)
        for number, length in enumerate(lengths)
    ]
    run.send(*messages)
    run.run()
    assert all(run.output[message.rid, 0] == run.answer(message) for message in messages)
