"""A request that kills every scheduler ends alone; all others are served."""

import httpx2

from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import failures
from tests.chaos.load import SHORT, Load, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import assert_nothing_is_left, watched
from tests.chaos.programs.crashing_scheduler import POISON
from tests.server_process import Server


async def test_a_poison_request_ends_after_three_crashes_and_others_finish(
    crashing: Server, references: References, table: Table
) -> None:
    jobs = shuffled(SHORT, 0)
    expected = await references.of(crashing.url, jobs)
    load = Load(crashing.url)
    answers: list[httpx2.Response] = []

    async def poison() -> None:
        await load.until(lambda: load.tokens > 200)
        body = {"input_ids": POISON, "sampling_params": {"max_new_tokens": 8}}
        async with httpx2.AsyncClient(base_url=crashing.url, timeout=120) as client:
            answers.append(await client.post("/generate", json=body))

    with watched(crashing) as parts:
        outcomes = await load.run(jobs, poison)
        deaths = sum("scheduler-0 died: " in line for line in crashing.lines)
        verdict = OutputCheck(crashing.url, expected).compare([each for each in outcomes if each.finished])
        table.add(f"{deaths} deaths; {len(outcomes)} other requests, {len(failures(outcomes))} failed")
        assert failures(outcomes) == []
        assert answers[0].status_code == 500
        assert answers[0].json()["error"]["type"] == "server_error"
        assert 1 <= deaths <= 3
        assert verdict.ties <= 1
        assert any(" fingerprint=" in line for line in crashing.lines)
        assert_nothing_is_left(await parts.idle())
