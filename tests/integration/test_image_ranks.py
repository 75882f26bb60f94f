"""Ranks say about images what one process says, for towers and attention that differ from those of others."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("soundfile")

from packages.scheduler.tests.executor.ranks.conftest import as_before, place  # noqa: F401
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Split
from tests.integration.image_families import FAMILIES, Parts, Run
from tests.integration.media_scripts import words
from tests.integration.test_image_families import FIVE, ONE
from tests.integration.test_sound_ranks import answers

CASES = [
    ("Gemma 4, whole images", Split(2)),
    ("LLaVA-OneVision", Split(1, 2)),
    *(
        pytest.param(name, split, marks=pytest.mark.slow)
        for name, split in (
            *(("LLaVA-OneVision", Split(2)), ("Llama 4", Split(2)), ("Llama 4", Split(1, 2))),
            *(("Mistral 3", Split(1, 2)), ("SmolVLM", Split(1, 2)), ("InternVL", Split(2, 2))),
        )
    ),
]


@pytest.mark.usefixtures("as_before", "place")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "split"), CASES, ids=str)
def test_ranks_read_images(name: str, split: Split, tmp_path: Path) -> None:
    directory = FAMILIES[name].write(tmp_path)
    run = Run(directory)
    asked: list[Parts] = [ONE, FIVE, [words(20, 9)]]
    prompts = [run.prompt(parts) for parts in asked]
    run.worker.close()
    options = WorkerOptions(model=directory, device="cpu", slots=4, page_size=4, kv_cache_bytes=1 << 24)
    expected = answers(TpModelWorker(options), prompts)
    assert len({token for output in expected.values() for token in output}) > 10
    ranks = Ranks(replace(options, overlap=split.stages > 1), split)
    assert answers(ranks, prompts, split.stages) == expected
