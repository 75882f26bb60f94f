"""The output check of this suite: it computes the score that the sampler maximizes, and accepts only ties."""

from copy import deepcopy

import httpx2
import pytest

from tests.chaos.conftest import References
from tests.chaos.load import Job, Load
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_the_token_that_was_chosen_has_the_best_score(single: Parts, references: References, number: int) -> None:
    job = Job(number)
    expected = await references.of(single.server.url, [job])
    check = OutputCheck(single.server.url, expected)
    with httpx2.Client(base_url=single.server.url, timeout=60) as client:
        for index, ids in expected[job].items():
            for position in (0, 17, 150):
                chosen = check.score(client, job, index, ids[:position], ids[position])
                for other in (ids[position + 1], ids[position + 2], 100, 2000):
                    if other != ids[position]:
                        assert chosen > check.score(client, job, index, ids[:position], other)


async def test_a_changed_token_a_lost_one_and_a_repeated_one_are_found(single: Parts, references: References) -> None:
    job = Job(1)
    check = OutputCheck(single.server.url, await references.of(single.server.url, [job]))
    (right,) = await Load(single.server.url).run([job])
    assert check.compare([right]).ties == 0
    at = next(at for at in range(20, 100) if len(set(right.ids[0][at : at + 2])) == 2)
    ids = right.ids[0]
    for wrong_ids in (
        [*ids[:at], (ids[at] + 1) % 3000, *ids[at + 1 :]],
        [*ids[:at], *ids[at + 1 :], ids[-1]],
        [*ids[: at + 2], *ids[at : at + 2], *ids[at + 2 : -2]],
    ):
        wrong = deepcopy(right)
        wrong.ids[0] = wrong_ids
        with pytest.raises(AssertionError, match="instead of"):
            check.compare([wrong])
