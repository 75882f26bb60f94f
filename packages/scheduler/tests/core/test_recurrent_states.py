"""Scheduling of models with recurrent state: snapshots in the radix cache, checkpoints, and their limits."""

from collections.abc import Sequence

import msgspec
import pytest

from tercet.protocol.messages.values import Grammar, GrammarKind, pack_ints
from tercet.scheduler.core import state_snapshots
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

SHARED = [1 + number % 40 for number in range(64)]


def driver(
    *, snapshots: int = 40, budget: int = 64, radix_cache: bool = True, pages: int = 400, draft_rows: int = 0
) -> Driver:
    capacity = small_capacity(pages=pages, snapshots=snapshots, context_length=1024)
    config = CoreConfig(token_budget=budget, radix_cache=radix_cache, draft_rows=draft_rows)
    return Driver(capacity, config, overlap=1)


def ask(run: Driver, rid: str, prompt: list[int], count: int = 8, prediction: Sequence[int] = ()) -> list[int]:
    """Return the answer to a request that runs alone, which must be right."""
    run.send(request(rid, prompt, max_new_tokens=count, ignore_eos=True, prediction=prediction))
    run.run()
    wanted = request(rid, prompt, max_new_tokens=count, ignore_eos=True)
    assert run.output[rid, 0] == run.answer(wanted)
    return run.output[rid, 0]


def cached_by(run: Driver, rid: str, prompt: list[int]) -> int:
    """Return the prompt tokens that a request finds in the cache."""
    before = run.core.counters.cached_tokens
    ask(run, rid, prompt)
    return run.core.counters.cached_tokens - before


def test_a_repeated_prompt_starts_from_the_snapshot_at_its_end() -> None:
    run = driver()
    assert cached_by(run, "first", [*SHARED, 7, 8, 9]) == 0
    assert cached_by(run, "again", [*SHARED, 7, 8, 9]) == 64


def test_the_second_prompt_that_branches_off_takes_the_snapshot_there() -> None:
    run = driver()
    assert cached_by(run, "first", [*SHARED, *[41] * 20]) == 0
    assert cached_by(run, "second", [*SHARED, *[42] * 20]) == 0, "the only state lies in tokens that are not shared"
    assert [cached_by(run, f"later {last}", [*SHARED, *[last] * 20]) for last in (43, 44, 45)] == [64, 64, 64]


def test_prompts_that_arrive_together_share_a_snapshot_where_they_part() -> None:
    run = driver(pages=1200, snapshots=80)
    prompts = {f"r{last}": [*SHARED * 3, *[last] * 20] for last in range(1, 9)}
    run.send(*(request(rid, prompt, max_new_tokens=4, ignore_eos=True) for rid, prompt in prompts.items()))
    run.run()
    for rid, prompt in prompts.items():
        assert run.output[rid, 0] == run.answer(request(rid, prompt, max_new_tokens=4, ignore_eos=True))
    assert run.core.counters.cached_tokens == 7 * 192


def test_each_turn_of_a_chat_computes_its_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_snapshots, "OUTPUT_INTERVAL", 4)
    run = driver()
    history, lacking = list(SHARED), []
    for turn in range(12):
        history += [1 + turn, 2, 3, 4, 5]
        before = run.core.counters.cached_tokens
        answer = ask(run, f"turn {turn}", history, 10)
        lacking.append(len(history) - (run.core.counters.cached_tokens - before))
        history += answer
    assert max(lacking[1:]) <= 5 + 2 * run.core.memory.page_size
    assert run.core.memory.states is not None


def starts_of(run: Driver, *prompts: list[int]) -> list[int]:
    """Return the place where each of some prompts, which arrive together, starts to be computed."""
    first, names = len(run.plans), [f"{len(run.plans)} {number}" for number in range(len(prompts))]
    run.send(*(request(rid, each, max_new_tokens=9, ignore_eos=True) for rid, each in zip(names, prompts, strict=True)))
    run.run()
    for rid, prompt in zip(names, prompts, strict=True):
        assert run.output[rid, 0] == run.answer(request(rid, prompt, max_new_tokens=9, ignore_eos=True))
    slots = [(plan, init.slot) for plan in run.plans[first:] for init in plan.introduce]
    return [row.start for plan, slot in slots for row in plan.rows if row.slot == slot]


def wide_driver() -> Driver:
    """Return a driver with room for 64 requests at once, and for all that they leave."""
    capacity = small_capacity(pages=8000, slots=64, snapshots=900, context_length=512)
    return Driver(capacity, CoreConfig(token_budget=1024))


@pytest.mark.parametrize(("before", "starts"), [(0, [0] + [128] * 63), (2, [128] * 64)])
def test_64_prompts_find_the_prefix_that_they_share(before: int, starts: list[int]) -> None:
    """Of prompts that arrive together, one computes it; after two others that show where they part, none does."""
    run = wide_driver()
    prompts = [[*SHARED * 2, 1 + number % 40, 41 + number // 40, *range(1, 19)] for number in range(before + 64)]
    for prompt in prompts[:before]:
        starts_of(run, prompt)
    assert sorted(starts_of(run, *prompts[before:])) == starts


def test_64_chats_find_their_history_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn computes its own tokens, and those since the last snapshot of the answer before it."""
    monkeypatch.setattr(state_snapshots, "OUTPUT_INTERVAL", 4)
    run, new = wide_driver(), [3, 1, 4, 1, 5]
    histories = [[1 + chat % 40, 41 + chat // 40, *SHARED] for chat in range(64)]
    assert starts_of(run, *histories) == [0] * 64
    for _ in range(3):
        answers = [run.answer(request("", each, max_new_tokens=9, ignore_eos=True)) for each in histories]
        histories = [[*each, *answer, *new] for each, answer in zip(histories, answers, strict=True)]
        starts = starts_of(run, *histories)
        assert min(starts) >= len(histories[0]) - len(new) - 4 - run.core.memory.page_size


def test_without_a_radix_cache_every_prompt_is_computed_whole() -> None:
    run = driver(radix_cache=False)
    assert cached_by(run, "first", SHARED) == cached_by(run, "again", SHARED) == 0
    run.assert_empty()


def test_choices_of_one_prompt_start_from_its_snapshot() -> None:
    run = driver()
    wanted = request("r", [*SHARED, 7, 8, 9], n=4, max_new_tokens=8, ignore_eos=True)
    run.send(wanted)
    run.run()
    assert all(run.output["r", index] == run.answer(wanted, index) for index in range(4))
    assert sum(len(plan.restores) for plan in run.plans) == 3


def test_a_late_mask_rewinds_the_state() -> None:
    capacity = small_capacity(pages=100, snapshots=8, grammars="any")
    late = iter([False, True, False, True, True] + [False] * 100)
    fake = FakeExecutor(capacity, grammar=lambda _: ((), False), defers=lambda _plan, _row: next(late))
    run = Driver(capacity, CoreConfig(token_budget=16), executor=fake)
    wanted = request("r", SHARED[:10], max_new_tokens=8, ignore_eos=True, grammar=Grammar(GrammarKind.REGEX, ""))
    run.send(wanted)
    run.run()
    assert run.output["r", 0] == run.answer(wanted)
    assert sum(len(plan.restores) for plan in run.plans) == 3
    run.assert_empty()


def test_a_snapshot_is_not_reused_while_a_plan_in_flight_reads_it() -> None:
    run = driver(snapshots=9)
    prompt = [*SHARED, 7, 8, 9]
    ask(run, "first", prompt)
    run.send(request("again", prompt, max_new_tokens=2, ignore_eos=True))
    plan = run.core.schedule()
    assert isinstance(plan, Plan)
    [restore] = plan.restores
    states = run.core.memory.states
    assert states is not None
    assert states.cache is not None
    while states.cache.evict_snapshot():
        pass
    assert restore.snapshot not in states.pool.free_pages
    run.core.commit(run.executor.submit(plan).result())
    assert restore.snapshot in states.pool.free_pages


def test_running_choices_leave_a_checkpoint_to_those_with_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_snapshots, "OUTPUT_INTERVAL", 4)
    capacity = small_capacity(pages=400, snapshots=10, grammars="any")
    run = Driver(capacity, CoreConfig(token_budget=64), executor=FakeExecutor(capacity, grammar=lambda _: ((), False)))
    sent = [request(f"r{number}", SHARED[number:], max_new_tokens=40, ignore_eos=True) for number in range(7)]
    run.send(*sent)
    for _ in range(30):
        run.step()
    states = run.core.memory.states
    assert states is not None
    assert sum(len(holding.taken) for holding in states.holdings.values()) == 2
    sent.append(request("constrained", SHARED, ignore_eos=True, grammar=Grammar(GrammarKind.REGEX, "")))
    run.send(sent[-1])
    run.run()
    assert all(run.output[wanted.rid, 0] == run.answer(wanted) for wanted in sent)
    run.assert_empty()


def predicted(run: Driver, prompt: list[int], count: int) -> list[int]:
    """Return the answer to a prompt, in which each seventh token is wrong."""
    answer = run.answer(request("", prompt, max_new_tokens=count, ignore_eos=True))
    return [token if place % 7 else token + 1 for place, token in enumerate(answer, start=1)]


@pytest.mark.parametrize("radix_cache", [True, False])
def test_a_rejected_draft_token_is_undone(radix_cache: bool) -> None:
    run = driver(draft_rows=8, radix_cache=radix_cache)
    ask(run, "r", SHARED, 60, predicted(run, SHARED, 60))
    counters = run.core.counters
    assert 40 < counters.accepted_tokens < counters.drafted_tokens
    undone = [restore for plan in run.plans for restore in plan.restores]
    assert 0 < len(undone) <= counters.drafted_tokens - counters.accepted_tokens
    run.assert_empty()


def test_snapshots_of_an_output_are_taken_among_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_snapshots, "OUTPUT_INTERVAL", 4)
    for wrong in (False, True):
        run = driver(draft_rows=8)
        told = predicted(run, SHARED, 43) if wrong else run.expected(SHARED, 43)
        answer = ask(run, "first", SHARED, 43, told)
        assert run.core.counters.accepted_tokens > 20
        assert cached_by(run, "turn", [*SHARED, *answer, 7]) == len(SHARED) + 40


def test_without_spare_snapshots_no_token_is_drafted() -> None:
    run = driver(snapshots=8, draft_rows=8)
    ask(run, "r", SHARED, 30, predicted(run, SHARED, 30))
    assert run.core.counters.drafted_tokens == 0
    run = driver(snapshots=10, draft_rows=8)
    ask(run, "r", SHARED, 30, predicted(run, SHARED, 30))
    assert max(len(plan.draft_tokens) for plan in run.plans) == 2


def test_a_late_mask_beside_draft_tokens_rewinds_the_state() -> None:
    capacity = small_capacity(pages=100, snapshots=20, grammars="any")
    late = iter([False, True, False, True, True] + [False] * 100)
    fake = FakeExecutor(capacity, grammar=lambda _: ((), False), defers=lambda _plan, _row: next(late))
    run = Driver(capacity, CoreConfig(token_budget=16, draft_rows=8), executor=fake)
    wanted = request("r", SHARED[:10], max_new_tokens=40, ignore_eos=True, grammar=Grammar(GrammarKind.REGEX, ""))
    answer = run.answer(wanted)
    told = [token if place % 7 else token + 1 for place, token in enumerate(answer, start=1)]
    run.send(msgspec.structs.replace(wanted, prediction=pack_ints(told)))
    run.run()
    assert run.output["r", 0] == answer
    assert 10 < run.core.counters.accepted_tokens < run.core.counters.drafted_tokens
    run.assert_empty()


def test_fewer_snapshots_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="7 snapshots are too few for 8 slots"):
        driver(snapshots=7)
