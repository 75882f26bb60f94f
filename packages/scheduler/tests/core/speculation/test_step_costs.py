"""Draft tokens where measured times of steps show that they pay, and none where they do not."""

import io
from collections.abc import Callable, Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.core.speculation.draft_policy import DraftPolicy
from tercet.scheduler.core.speculation.step_costs import FEW, KNOWN, MOST_TRIES, RETRY, TRIAL_GAIN, TRIALS, StepCosts
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity
from tercet.scheduler.testing.fake_executor import Done

NEVER = float("inf")
STEP = 0.005
PROMPT = range(1, 13)

Cost = Callable[[Plan], float]


class Clocked(FakeExecutor):
    """Device that takes its time for each step, one after another; waiting for a result advances the driver's clock."""

    def __init__(self, cost: Cost) -> None:
        super().__init__(small_capacity(pages=256, slots=8))
        self.run: Driver | None = None
        self._cost = cost
        self._free = 0.0

    def submit(self, plan: Plan) -> Done:
        done, run = super().submit(plan), self.run
        assert run is not None
        self._free = end = max(self._free, run.now) + self._cost(plan)

        def wait() -> None:
            done.on_result()
            run.now = max(run.now, end)

        return Done(done.value, wait)


def clocked(cost: Cost, *, by_cost: bool = True, rows: int = 8, overlap: int = 1) -> Driver:
    executor = Clocked(cost)
    config = CoreConfig(token_budget=64, draft_rows=rows, draft_by_cost=by_cost)
    run = Driver(small_capacity(pages=256, slots=8), config, overlap=overlap, executor=executor)
    executor.run = run
    return run


def costing(ratio: float) -> Cost:
    """Return times of steps, of which those with draft tokens take `ratio` times as long."""
    return lambda plan: STEP * (ratio if plan.draft_tokens else 1.0)


def predicted(run: Driver, rid: str, prompt: Sequence[int], wrong: Callable[[int], bool]) -> TokenizedGenerateReqInput:
    """Return a request whose answer is predicted, except at some positions."""
    truth = run.answer(request(rid, prompt, max_new_tokens=120, ignore_eos=True))
    text = [(token + 1) % 50 if wrong(position) else token for position, token in enumerate(truth)]
    return request(rid, prompt, max_new_tokens=120, ignore_eos=True, prediction=text)


def seconds(run: Driver, choices: int, wrong: Callable[[int], bool]) -> float:
    """Return the time of a number of choices that run at once, after checking all their tokens."""
    asked = [predicted(run, f"r{number}", [*PROMPT, number], wrong) for number in range(choices)]
    run.send(*asked)
    run.run()
    for message in asked:
        assert run.output[message.rid, 0] == run.answer(message)
    run.assert_empty()
    return run.now


def right(_: int) -> bool:
    return False


class Measured:
    """Costs of steps that follow each other."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._now = 1.0

    def steps(self, *times: float, choices: int = 1, drafts: bool = False) -> None:
        """Note steps of one kind with these times, and one that ends the last of them."""
        for time in (*times, 0.0):
            self.costs.observe(self._now, choices, drafts=drafts, in_flight=0)
            self._now += time


def test_nothing_is_known_before_enough_plain_steps() -> None:
    measured = Measured()
    costs = measured.costs
    assert costs.least_gain(1) == NEVER
    measured.steps(*[STEP] * (KNOWN - 1))
    assert costs.least_gain(1) == NEVER
    measured.steps(STEP)
    assert (costs.least_gain(1), costs.least_gain(2)) == (TRIAL_GAIN, NEVER)


def test_the_least_gain_pays_for_the_longer_step_of_all_choices() -> None:
    for choices, ratio, least in [(1, 1.2, 0.2), (3, 1.2, 0.6), (FEW, 1.1, 1.0), (6, 1.5, 3.0), (2, 0.9, 0.0)]:
        measured = Measured()
        measured.steps(STEP, 3 * STEP, STEP, STEP, choices=choices)
        measured.steps(ratio * STEP, 9 * STEP, ratio * STEP, choices=choices, drafts=True)
        assert measured.costs.least_gain(choices) == pytest.approx(least)


def test_idle_time_and_prompts_are_in_no_time() -> None:
    costs = StepCosts()
    for at in range(20):
        costs.observe(at * 1.0, 1, drafts=False, in_flight=0)
        costs.observe(at + 0.5, 0, drafts=False, in_flight=0)
    assert costs.least_gain(1) == NEVER


def test_steps_that_run_ahead_count_from_the_second_of_a_kind() -> None:
    costs = StepCosts()
    costs.observe(0.0, 1, drafts=False, in_flight=0)
    for step in range(1, KNOWN + 3):
        assert costs.least_gain(1) == NEVER, step
        costs.observe(step * STEP, 1, drafts=False, in_flight=1)
    assert costs.least_gain(1) == TRIAL_GAIN


def test_trials_end_without_times_and_begin_again_after_many_steps() -> None:
    measured = Measured()
    costs = measured.costs
    measured.steps(*[STEP] * KNOWN)
    for _ in range(MOST_TRIES):
        assert costs.least_gain(1) == TRIAL_GAIN
        costs.observe(0.0, 1, drafts=True, in_flight=1)
        costs.observe(0.0, 1, drafts=False, in_flight=0)
    assert costs.least_gain(1) == NEVER
    measured.steps(*[STEP] * RETRY)
    assert costs.least_gain(1) == TRIAL_GAIN


def test_a_choice_expects_more_of_a_draft_the_more_were_accepted() -> None:
    policy = DraftPolicy()
    gains = [policy.gain(count) for count in range(8)]
    assert gains[0] == 0
    assert gains == sorted(gains)
    assert gains[1] == pytest.approx(1 / 1.5)
    assert gains[2] == pytest.approx(1 / 1.5 + (1 / 1.5) ** 2)
    for _ in range(4):
        policy.learn(3, 0)
    assert policy.gain(3) < 0.4
    for _ in range(400):
        policy.forget()
    assert policy.gain(3) == pytest.approx(gains[3], abs=0.01)


@pytest.mark.parametrize("overlap", [0, 1])
def test_right_drafts_are_made_where_steps_with_them_are_cheap(overlap: int) -> None:
    times = [seconds(clocked(costing(1.2), rows=rows, overlap=overlap), 1, right) for rows in (0, 8)]
    assert times[1] < 0.45 * times[0]


@pytest.mark.parametrize("choices", [1, 3, 5])
def test_where_they_are_dear_they_end_after_trials(choices: int) -> None:
    run = clocked(costing(20.0))
    without = seconds(clocked(costing(20.0), rows=0), choices, right)
    assert seconds(run, choices, right) < without + MOST_TRIES * 20 * STEP
    drafted = [plan for plan in run.plans if plan.draft_tokens]
    assert 0 < len(drafted) <= MOST_TRIES
    assert not run.plans[-1].draft_tokens


def test_an_explicit_number_of_tokens_asks_for_no_times() -> None:
    run = clocked(costing(20.0), by_cost=False)
    seconds(run, 1, right)
    assert sum(bool(plan.draft_tokens) for plan in run.plans) > MOST_TRIES


def test_wrong_drafts_end_where_steps_with_them_are_longer() -> None:
    run = clocked(costing(1.3))
    without = seconds(clocked(costing(1.3), rows=0), 1, right)
    assert seconds(run, 1, lambda position: position % 2 == 0) < 1.1 * without


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    ratio=st.floats(0.8, 6.0),
    choices=st.integers(1, 7),
    period=st.integers(1, 30),
    overlap=st.sampled_from([0, 1]),
)
def test_draft_tokens_cost_little_whatever_a_step_takes(ratio: float, choices: int, period: int, overlap: int) -> None:
    """The bound has the trials of every number of choices, which fall from `choices` to 1."""

    def wrong(position: int) -> bool:
        return position % period == 0

    plain = seconds(clocked(costing(ratio), rows=0, overlap=overlap), choices, wrong)
    mine = seconds(clocked(costing(ratio), overlap=overlap), choices, wrong)
    assert mine <= 1.15 * plain + choices * TRIALS * ratio * STEP


def test_a_log_with_times_replays() -> None:
    file = io.BytesIO()
    run = clocked(costing(1.1))
    recording = RecordingScheduler(run.core, LogFile(file).record)
    executor = Clocked(costing(1.1))
    executor.run = run
    recording.handle(Arrival("frontend-0", predicted(run, "a", PROMPT, right)))
    while plan := recording.schedule(run.now):
        recording.commit(executor.submit(plan).result())
    file.seek(0)
    plans = list(replay(read_events(file)))
    drafted = [bool(logged.draft_tokens) for _, logged, _ in plans if logged is not None]
    assert not any(drafted[:KNOWN])
    assert any(drafted)
    assert all(logged == derived for _, logged, derived in plans)
