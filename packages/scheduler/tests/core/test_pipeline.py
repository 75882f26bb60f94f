"""A core whose executor is a pipeline: each stage computes another step, and none waits for a result it cannot have."""

from collections import Counter
from collections.abc import Sequence

import pytest

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

STAGES = [2, 4]


class PendingPass:
    """A step on its way through the stages."""

    def __init__(self, pipeline: "Pipeline", result: StepResult, end: float) -> None:
        self._pipeline = pipeline
        self._result = result
        self._end = end

    def result(self) -> StepResult:
        self._pipeline.now = max(self._pipeline.now, self._end)
        return self._result


class Pipeline(FakeExecutor):
    """Stages that take a second for a step each; the time stands still but while a result is waited for."""

    def __init__(self, capacity: Capacity, stages: int) -> None:
        super().__init__(capacity)
        self.now = 0.0
        self.free = [0.0] * stages
        self.steps = 0

    def submit(self, plan: Plan) -> PendingPass:  # type: ignore[override]
        result = super().submit(plan).result()
        end = self.now
        for stage, free in enumerate(self.free):
            end = self.free[stage] = max(end, free) + 1.0
        self.steps += 1
        return PendingPass(self, result, end)


def driver_of(stages: int, slots: int = 16) -> Driver:
    capacity = small_capacity(slots=slots, pages=400)
    config = CoreConfig(token_budget=32, stages=stages)
    return Driver(capacity, config, overlap=stages, executor=Pipeline(capacity, stages))


def ask(driver: Driver, rids: Sequence[str], tokens: int = 40) -> None:
    for number, rid in enumerate(rids):
        driver.send(request(rid, [number + 1, 2, 3], max_new_tokens=tokens, ignore_eos=True))


def assert_answers(driver: Driver) -> None:
    """Assert that every choice has the tokens of the fake model."""
    alone = Driver(small_capacity(slots=16, pages=400), CoreConfig(token_budget=32))
    ask(alone, [rid for rid, _ in driver.output])
    alone.run()
    assert driver.output == alone.output


@pytest.mark.parametrize("stages", STAGES)
def test_no_choice_is_in_two_plans_that_sample_at_a_time(stages: int) -> None:
    driver = driver_of(stages)
    ask(driver, [f"r{number}" for number in range(9)])
    flying: list[Plan] = []
    while driver.step():
        flying = driver.plans[-len(driver.in_flight) :] if driver.in_flight else []
        sampling = Counter(row.slot for plan in flying for row in plan.rows if row.sample)
        assert all(count == 1 for count in sampling.values())
    assert len({len(plan.rows) for plan in driver.plans[20:-20]}) <= 2, "shares differ by one"
    assert_answers(driver)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("requests", [16, 13])
def test_stages_are_busy_with_enough_requests(stages: int, requests: int) -> None:
    driver = driver_of(stages)
    ask(driver, [f"r{number}" for number in range(requests)])
    driver.run()
    pipeline = driver.executor
    assert isinstance(pipeline, Pipeline)
    assert pipeline.steps / pipeline.now > 0.9
    tokens = sum(map(len, driver.output.values()))
    ideal = tokens * stages / requests  # steps of equal shares of the requests, without a bubble
    assert ideal / pipeline.now > 0.9
    assert_answers(driver)


def test_chunks_of_one_prompt_follow_one_another_through_the_stages() -> None:
    driver = driver_of(4)
    driver.send(request("long", [*range(1, 49)] * 3, max_new_tokens=2, ignore_eos=True))
    driver.step()
    driver.step()
    assert len(driver.in_flight) == 2
    assert [row.start for plan in driver.plans for row in plan.rows] == [0, 32]
    driver.run()
    driver.assert_empty()


def test_a_single_request_is_planned_after_its_result_alone() -> None:
    driver = driver_of(4)
    ask(driver, ["alone"], tokens=5)
    most = 0
    while driver.step():
        most = max(most, len(driver.in_flight))
    assert most <= 1
    assert len(driver.output["alone", 0]) == 5


def test_choices_with_a_grammar_share_the_stages() -> None:
    capacity = small_capacity(slots=8, pages=400, grammars="countdown")
    driver = Driver(capacity, CoreConfig(token_budget=32, stages=2), overlap=2, executor=Pipeline(capacity, 2))
    for number in range(4):
        grammar = Grammar(GrammarKind.REGEX, "7")
        driver.send(request(f"g{number}", [number + 1, 2], max_new_tokens=20, grammar=grammar, ignore_eos=False))
    driver.run()
    assert len(driver.finishes) == 4
    driver.assert_empty()


def test_draft_tokens_do_not_go_with_stages() -> None:
    with pytest.raises(ValueError, match="stages must be at least 1, and draft_rows 0 with several"):
        CoreConfig(stages=2, draft_rows=8)
