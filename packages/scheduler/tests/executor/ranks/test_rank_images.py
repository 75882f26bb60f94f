"""Ranks that read images say what one process says: rank 0 encodes them, and sends the embeddings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from packages.scheduler.tests.executor.ranks.test_pipeline import other_hosts
from packages.scheduler.tests.models.vision import test_gemma3, test_qwen
from packages.scheduler.tests.models.vision.checkpoint import write_gemma3
from packages.scheduler.tests.models.vision.qwen_checkpoint import write_qwen
from tercet.protocol.messages.media import ImageInput
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan
from tercet.scheduler.executor.media.tower_worker import TowerWorker
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.testing import Driver, request

Prompt = tuple[list[int], list[ImageInput], list[bytes]]
MODELS: dict[str, tuple[Callable[[Path], Path], Sequence[Prompt]]] = {
    "tokens of an image see each other": (
        write_gemma3,
        [test_gemma3.prompt_of(parts) for parts in (test_gemma3.ONE, test_gemma3.FIVE, [test_gemma3.words(20, 9)])],
    ),
    "positions have parts": (
        lambda directory: write_qwen(directory, "Qwen3VL"),
        [test_qwen.prompt_of(parts) for parts in (test_qwen.ONE, test_qwen.FIVE, [test_qwen.words(20, 9)])],
    ),
}


def answers(
    executor: Ranks | TpModelWorker, prompts: Sequence[Prompt], stages: int = 1
) -> dict[tuple[str, int], list[int]]:
    """Return the answers to prompts that run side by side, in chunks, and twice: the second time from the cache."""
    overlap = stages if stages > 1 else 0
    driver = Driver(executor.capacity, CoreConfig(token_budget=17, stages=stages), overlap=overlap, executor=executor)
    assert executor.images is not None
    for turn in range(2):
        for number, (ids, images, arrays) in enumerate(prompts):
            if images:
                assert executor.images.add(images, arrays) == ""
            given = request(f"r{turn}-{number}", ids, images=images, max_new_tokens=12, temperature=0.0)
            driver.send(given)
        driver.run()
    executor.close()
    assert not driver.rejected
    return driver.output


@pytest.mark.usefixtures("as_before")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_read_images(kind: str, hosts: int, place: Path, tmp_path: Path) -> None:
    write, prompts = MODELS[kind]
    directory = write(tmp_path)
    options = WorkerOptions(model=directory, device="cpu", slots=4, page_size=4, kv_cache_bytes=1 << 24)
    expected = answers(TpModelWorker(options), prompts)
    assert len({token for output in expected.values() for token in output}) > 10
    with other_hosts(directory, hosts, place) as network:
        assert answers(Ranks(options, Split(2), network=network), prompts) == expected


@pytest.mark.usefixtures("as_before", "place")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", [Split(1, 2), pytest.param(Split(2, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_pipeline_stages_read_images(kind: str, split: Split, tmp_path: Path) -> None:
    write, prompts = MODELS[kind]
    options = WorkerOptions(model=write(tmp_path), device="cpu", slots=4, page_size=4, kv_cache_bytes=1 << 24)
    expected = answers(TpModelWorker(options), prompts)
    assert answers(Ranks(replace(options, overlap=True), split), prompts, split.stages) == expected


@pytest.mark.usefixtures("as_before", "place")
def test_stages_of_fewer_layers_than_get_embeddings_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_qwen(tmp_path, "Qwen3VL")
    ranks = Ranks(
        WorkerOptions(model=directory, device="cpu", slots=4, kv_cache_bytes=1 << 24, overlap=True), Split(1, 3)
    )
    ranks.close()
    assert ranks.capacity.images is None
    assert "requests with images are refused: the first 2 layers get embeddings" in caplog.text


def embedded(directory: Path, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with the embeddings of an encoder in the place of arrays."""
    worker = TowerWorker(WorkerOptions(model=directory, device="cpu"))

    def frame(image: ImageInput, array: bytes) -> bytes:
        plan = EncodeMediaPlan(step=0, media=image, array=memoryview(array))
        return worker.submit(plan).result().embeddings

    return [(ids, images, list(map(frame, images, arrays))) for ids, images, arrays in prompts]


@pytest.mark.usefixtures("as_before", "place")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", [Split(2), Split(1, 2)], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_ranks_without_a_tower_read_embeddings(kind: str, split: Split, tmp_path: Path) -> None:
    write, prompts = MODELS[kind]
    options = WorkerOptions(model=write(tmp_path), device="cpu", slots=4, page_size=4, kv_cache_bytes=1 << 24)
    expected = answers(TpModelWorker(options), prompts)
    alone = replace(options, overlap=split.stages > 1, language_only=True)
    assert answers(Ranks(alone, split), embedded(options.model, prompts), split.stages) == expected


@pytest.mark.usefixtures("as_before", "place")
def test_stages_that_cannot_take_embeddings_are_refused(tmp_path: Path) -> None:
    options = WorkerOptions(
        model=write_qwen(tmp_path, "Qwen3VL"), device="cpu", slots=4, kv_cache_bytes=1 << 24, language_only=True
    )
    with pytest.raises(ValueError, match="language_only: the first 2 layers get embeddings"):
        Ranks(replace(options, overlap=True), Split(1, 3))
