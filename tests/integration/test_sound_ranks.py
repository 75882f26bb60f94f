"""Ranks that hear say what one process says: rank 0 encodes sounds, and sends the embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("soundfile")

from packages.scheduler.tests.executor.ranks.conftest import as_before, place  # noqa: F401
from tercet.frontend.manager.inputs.images import images_in, sounds_in
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.testing import Driver, request
from tests.integration.image_families import Parts, Prompt
from tests.integration.media_scripts import words
from tests.integration.sound_families import FAMILIES, HearingRun
from tests.integration.test_sound_families import FOUR, ONE


def answers(
    executor: Ranks | TpModelWorker, prompts: Sequence[Prompt], stages: int = 1
) -> dict[tuple[str, int], list[int]]:
    """Return the answers to prompts that run side by side, in chunks, and twice: the second time from the cache."""
    overlap = stages if stages > 1 else 0
    driver = Driver(executor.capacity, CoreConfig(token_budget=17, stages=stages), overlap=overlap, executor=executor)
    assert executor.images is not None
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            places, arrays = [each.place for each in prompt.images], [each.array for each in prompt.images]
            assert executor.images.add(places, arrays) == ""
            media: dict[str, Any] = {"images": images_in(places), "sounds": sounds_in(places)}
            driver.send(request(f"r{turn}-{number}", prompt.ids, **media, max_new_tokens=12, temperature=0.0))
        driver.run()
    executor.close()
    assert not driver.rejected
    return driver.output


@pytest.mark.usefixtures("as_before", "place")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", [Split(2), Split(1, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_hear(name: str, split: Split, tmp_path: Path) -> None:
    directory = FAMILIES[name].write(tmp_path)
    asked: list[Parts] = [ONE, FOUR, [words(20, 9)]]
    run = HearingRun(directory)
    prompts = [run.prompt(parts) for parts in asked]
    run.worker.close()
    options = WorkerOptions(model=directory, device="cpu", slots=4, page_size=4, kv_cache_bytes=1 << 24)
    expected = answers(TpModelWorker(options), prompts)
    assert len({token for output in expected.values() for token in output}) > 10
    ranks = Ranks(replace(options, overlap=split.stages > 1), split)
    assert answers(ranks, prompts, split.stages) == expected
