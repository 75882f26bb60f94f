"""Qwen2-VL and its successors with images of several sizes, chunk by chunk and beside text, against transformers."""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec import structs
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from packages.scheduler.tests.models.vision.qwen_checkpoint import END, FAMILIES, IMAGE, SQUARE, START, write_qwen
from tercet.protocol.messages.media import ImageInput, PixelRange
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.tower import load_tower
from tercet.scheduler.models.vision.image_model import CPU_TOKENS, bounded_for_cpu
from tercet.scheduler.models.vision.qwen import QwenTower, image_model
from tercet.scheduler.testing import Driver, request

LONG, SHORT = 100, 24
"""Tokens of answers."""
SIZES = [(3, 5), (1, 7), (4, 2), (2, 2), (6, 3), (1, 4), (5, 5), (2, 9)]
"""Rows and columns of the embeddings of each image."""
Parts = Sequence[int | list[int]]
"""Numbers of images, and runs of token ids."""


@cache
def image(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rows, columns = SIZES[number]
    shape = rows * SQUARE, columns * SQUARE, 3
    return np.frombuffer(random.Random(number).randbytes(int(np.prod(shape))), np.uint8).reshape(shape)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, START), k=count)


def prompt_of(parts: Parts) -> tuple[list[int], list[ImageInput], list[bytes]]:
    """Return the ids of a prompt, its images (numbers in `parts`) and their arrays."""
    ids, images, arrays = [1], [], []
    for part in parts:
        if not isinstance(part, int):
            ids += part
            continue
        array = image(part)
        height, width, _ = array.shape
        tokens = SIZES[part][0] * SIZES[part][1]
        ids.append(START)
        sha256 = hashlib.sha256(b"%d %d " % (height, width) + array.tobytes()).digest()
        images.append(ImageInput(sha256=sha256, height=height, width=width, first=len(ids), tokens=tokens))
        arrays.append(array.tobytes())
        ids += [*[IMAGE] * tokens, END]
    return ids, images, arrays


class Run:
    """A core over a real worker, which gets arrays as the loop gives them."""

    def __init__(self, directory: Path, *, budget: int = 512, drafts: int = 0, **options: Any) -> None:
        made: dict[str, Any] = {"device": "cpu", "slots": 4, "page_size": 4, "kv_cache_bytes": 1 << 24}
        self.worker = TpModelWorker(WorkerOptions(model=directory, draft_rows=drafts, **(made | options)))
        config = CoreConfig(token_budget=budget, draft_rows=drafts)
        self.driver = Driver(self.worker.capacity, config, executor=self.worker)

    def send(self, rid: str, parts: Parts, count: int = SHORT, **more: Any) -> None:
        ids, images, arrays = prompt_of(parts)
        given = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0}
        asked = request(rid, ids, images=images, **(given | more))
        if images:
            assert self.worker.images is not None
            assert self.worker.images.add(images, arrays) == ""
        self.driver.send(asked)

    def answers(self, requests: Mapping[str, Parts], count: int = SHORT) -> dict[str, list[int]]:
        """Return the answers to requests that run side by side."""
        for rid, parts in requests.items():
            self.send(rid, parts, count)
        self.driver.run()
        return {rid: self.driver.output[rid, 0] for rid in requests}


class Reference:
    """transformers' `generate`, with its image processor."""

    def __init__(self, directory: Path, family: str) -> None:
        kind = getattr(transformers, f"{family}ForConditionalGeneration")
        self._model: Any = kind.from_pretrained(directory, attn_implementation="eager")
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(directory, do_resize=False)
        self._known: dict[str, list[int]] = {}

    @torch.inference_mode()
    def answer(self, parts: Parts, count: int = SHORT) -> list[int]:
        key = repr(parts)
        if len(self._known.get(key, ())) < count:
            ids = torch.tensor([prompt_of(parts)[0]])
            arrays = [image(part) for part in parts if isinstance(part, int)]
            given = dict(self.processor(arrays, return_tensors="pt")) if arrays else {}
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == IMAGE).int(),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                **given,
            )
            self._known[key] = out[0, ids.shape[1] :].tolist()
            assert len(set(self._known[key])) > 2, "an answer of one token would prove little"
        return self._known[key][:count]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen"), family)


@pytest.fixture(scope="module")
def reference(directory: Path, family: str) -> Reference:
    return Reference(directory, family)


ONE: Parts = [words(5, 1), 0, words(9, 2)]
TWO: Parts = [words(21, 3), 1, 2, words(3, 4)]
FIVE: Parts = [3, words(2, 5), 4, 5, words(30, 6), 6, 7, words(4, 7)]
FOUR: Parts = FIVE[:4]
TEXT_ONLY: Parts = [words(33, 8)]
ALL = {"one": ONE, "two": TWO, "five": FIVE, "text": TEXT_ONLY}


def test_patches_equal_those_of_the_processor(directory: Path, reference: Reference) -> None:
    model = image_model(directory)
    assert model is not None
    tower = load_tower(model, directory, torch.float32, torch.device("cpu"))
    assert isinstance(tower, QwenTower)
    for number in range(len(SIZES)):
        expected = reference.processor([image(number)], return_tensors="pt")
        patches, grid = tower.patches(torch.from_numpy(image(number).copy()))
        torch.testing.assert_close(patches, expected["pixel_values"], atol=0, rtol=0)
        assert grid.tolist() == expected["image_grid_thw"].tolist()


@pytest.mark.parametrize("backend", ["torch_native", "auto"])
@pytest.mark.parametrize("budget", [512, 7])
def test_answers_equal_those_of_transformers(directory: Path, reference: Reference, backend: str, budget: int) -> None:
    run = Run(directory, attention_backend=backend, budget=budget)
    answers = run.answers(ALL, LONG)
    run.worker.close()
    assert answers == {name: reference.answer(parts, LONG) for name, parts in ALL.items()}


def test_a_cpu_takes_no_images_that_take_too_long(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = image_model(directory)
    assert model is not None
    assert bounded_for_cpu(model) is model
    most = PixelRange(min_pixels=9, max_pixels=1 << 24)
    bounded = bounded_for_cpu(replace(model, form=structs.replace(model.form, size=most)))
    assert bounded.form.size == PixelRange(min_pixels=9, max_pixels=CPU_TOKENS * SQUARE**2)
    assert f"{1 << 24}: on a CPU" in caplog.text


def test_checkpoints_of_transformers_5_are_read(family: str, reference: Reference, tmp_path: Path) -> None:
    run = Run(write_qwen(tmp_path, family, old=False))
    answers = run.answers({"two": TWO})
    run.worker.close()
    assert answers == {"two": reference.answer(TWO)}


def test_a_model_with_recurrent_layers_sees(tmp_path: Path) -> None:
    directory = write_qwen(tmp_path, "Qwen3_5", old=False)
    reference, run = Reference(directory, "Qwen3_5"), Run(directory, budget=7)
    before, after = words(30, 10), words(6, 11)
    chats: dict[str, Parts] = {
        "again": ONE,
        "first": [before, 0, after],
        "cached": [before, 0, after],
        "ends inside": [before, 0, words(5, 12)],
        "another": [before, 4, after],
        "goes on": [before, 4, after, 0, words(3, 13)],
    }
    answers = run.answers(ALL)
    hits = {}
    for name, parts in chats.items():
        counted = run.driver.core.counters.cached_tokens
        answers |= run.answers({name: parts})
        hits[name] = run.driver.core.counters.cached_tokens - counted
    check_interrupted_choices(run, reference)
    run.worker.close()
    assert answers == {name: reference.answer(parts) for name, parts in {**ALL, **chats}.items()}
    assert hits["first"] == 0
    assert min(hits["cached"], hits["goes on"]) > len(before), "a snapshot after the image"


@pytest.fixture(scope="module")
def run(directory: Path) -> Iterator[Run]:
    run = Run(directory, budget=32, drafts=12)
    yield run
    run.worker.close()


def test_prefix_hits_before_inside_and_after_an_image_change_no_answer(run: Run, reference: Reference) -> None:
    encoded: list[int] = []
    run.worker._runner._media._images._tower.register_forward_hook(lambda *_: encoded.append(1))  # type: ignore[union-attr]
    before, after = words(14, 10), words(6, 11)
    chats: list[Parts] = [
        [before, 0, after],
        [before, 0, after],  # all but the last page
        [before, 0, words(5, 12)],  # ends inside the image or right after it
        [before, 4, after],  # another image: what was before it
        [before, 4, after, 0, words(3, 13)],
    ]
    hits = []
    for number, parts in enumerate(chats):
        counted = run.driver.core.counters.cached_tokens
        assert run.answers({f"r{number}": parts})[f"r{number}"] == reference.answer(parts)
        hits.append(run.driver.core.counters.cached_tokens - counted)
    assert hits == [0, 36, 32, 16, 40]
    assert len(encoded) == 2, "each image is encoded once"


def test_retracted_forked_and_resumed_choices_get_the_same_answers(run: Run, reference: Reference) -> None:
    check_interrupted_choices(run, reference)
    assert run.driver.core.counters.drafted_tokens


def check_interrupted_choices(run: Run, reference: Reference) -> None:
    """Check the answers of choices that are retracted amid their prompts, of n = 2, and of one that goes on."""
    asked: dict[str, Parts] = {"forked one": ONE, "forked two": TWO, "forked three": [3, words(9, 14)]}
    for rid, parts in asked.items():
        run.send(rid, parts, n=2)
    begun = run.driver.output["resumed", 0] = reference.answer(FOUR)[:5]
    run.send("resumed", FOUR, attempt=1, resume=[Resume(0, pack_ints(begun))])
    for _ in range(6):
        run.driver.step()
    planner = run.driver.core.planner
    before = run.driver.core.counters.retractions
    for req in [req for req in planner.running if not req.in_flight]:
        planner.retract(req)
    run.driver.core.memory.flush()
    run.driver.run()
    for rid, parts in asked.items():
        assert [run.driver.output[rid, index] for index in (0, 1)] == [reference.answer(parts)] * 2
    assert run.driver.output["resumed", 0] == reference.answer(FOUR)
    assert run.driver.core.counters.retractions > before
