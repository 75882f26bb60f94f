"""Gemma 3 with images, chunk by chunk and beside text, against transformers."""

import hashlib
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from packages.scheduler.tests.models.vision.checkpoint import (
    BEGIN,
    END,
    IMAGE,
    SIZE,
    TOKENS,
    processor_of,
    write_gemma3,
)
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.vision.gemma3 import image_model
from tercet.scheduler.testing import Driver, request

ANSWER = 12
Parts = Sequence[int | list[int]]
"""Numbers of images, and runs of token ids."""


@pytest.fixture(scope="module", params=[True, False], ids=["names of transformers 4", "names of transformers 5"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3"), old_names=request.param)


@cache
def image(number: int) -> bytes:
    return random.Random(number).randbytes(3 * SIZE * SIZE)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, BEGIN), k=count)


def prompt_of(parts: Parts) -> tuple[list[int], list[ImageInput], list[bytes]]:
    """Return the ids of a prompt, its images (numbers in `parts`) and their arrays."""
    ids, images, arrays = [1], [], []
    for part in parts:
        if isinstance(part, int):
            array = image(part)
            ids.append(BEGIN)
            images.append(
                ImageInput(
                    sha256=hashlib.sha256(array).digest(), height=SIZE, width=SIZE, first=len(ids), tokens=TOKENS
                )
            )
            arrays.append(array)
            ids += [*[IMAGE] * TOKENS, END]
        else:
            ids += part
    return ids, images, arrays


class Run:
    """A core over a real worker, which gets arrays as the loop gives them."""

    def __init__(self, directory: Path, *, budget: int = 512, **options: Any) -> None:
        made: dict[str, Any] = {"device": "cpu", "slots": 4, "page_size": 4, "kv_cache_bytes": 1 << 24}
        self.worker = TpModelWorker(WorkerOptions(model=directory, **(made | options)))
        self.driver = Driver(self.worker.capacity, CoreConfig(token_budget=budget), executor=self.worker)

    def send(self, rid: str, parts: Parts, **more: Any) -> TokenizedGenerateReqInput:
        ids, images, arrays = prompt_of(parts)
        given = {"max_new_tokens": ANSWER, "ignore_eos": True, "temperature": 0.0}
        asked = request(rid, ids, images=images, **(given | more))
        if images:
            assert self.worker.images is not None
            assert self.worker.images.add(images, arrays) == ""
        self.driver.send(asked)
        return asked

    def answers(self, **requests: Parts) -> dict[str, list[int]]:
        """Return the answers to requests that run side by side."""
        for rid, parts in requests.items():
            self.send(rid, parts)
        self.driver.run()
        return {rid: self.driver.output[rid, 0] for rid in requests}


class Reference:
    """transformers' `generate`."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            directory, attn_implementation="eager"
        )
        self._known: dict[str, list[int]] = {}

    @torch.inference_mode()
    def answer(self, parts: Parts) -> list[int]:
        key = repr(parts)
        if key not in self._known:
            ids, images, arrays = prompt_of(parts)
            given: dict[str, Any] = {}
            if images:
                pixels = np.stack([np.frombuffer(array, np.uint8).reshape(SIZE, SIZE, 3) for array in arrays])
                given["pixel_values"] = torch.from_numpy((pixels.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.4).float()
                given["token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in ids]])
            inputs = torch.tensor([ids])
            out = self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                eos_token_id=None,
                **given,
            )
            self._known[key] = out[0, len(ids) :].tolist()
        return self._known[key]


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


ONE: Parts = [words(5, 1), 1, words(9, 2)]
TWO: Parts = [words(21, 3), 2, 3, words(3, 4)]
FIVE: Parts = [4, words(2, 5), 5, 6, words(30, 6), 7, 8, words(4, 7)]
FOUR: Parts = FIVE[:4]
TEXT_ONLY: Parts = [words(33, 8)]
ALL = {"one": ONE, "two": TWO, "five": FIVE, "text": TEXT_ONLY}


@pytest.mark.parametrize("backend", ["torch_native", "auto"])
@pytest.mark.parametrize("budget", [512, 7])
def test_answers_equal_those_of_transformers(directory: Path, reference: Reference, backend: str, budget: int) -> None:
    run = Run(directory, attention_backend=backend, budget=budget)
    answers = run.answers(**ALL)
    run.worker.close()
    assert answers == {name: reference.answer(parts) for name, parts in ALL.items()}


def test_prefix_hits_before_inside_and_after_an_image_change_no_answer(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    encoded: list[int] = []
    run.worker._runner._media._images._tower.register_forward_hook(lambda *_: encoded.append(1))  # type: ignore[union-attr]
    before, after = words(14, 10), words(6, 11)
    chats: list[Parts] = [
        [before, 1, after],
        [before, 1, after],  # all but the last page
        [before, 1, words(5, 12)],  # ends inside the image or right after it
        [before, 2, after],  # another image: what was before it
        [before, 2, after, 1, words(3, 13)],
    ]
    hits = []
    for number, parts in enumerate(chats):
        counted = run.driver.core.counters.cached_tokens
        assert run.answers(**{f"r{number}": parts})[f"r{number}"] == reference.answer(parts)
        hits.append(run.driver.core.counters.cached_tokens - counted)
    assert hits == [0, 28, 24, 16, 32]
    assert len(encoded) == 2, "each image is encoded once"
    run.worker.close()


def test_retracted_forked_and_resumed_choices_get_the_same_answers(directory: Path, reference: Reference) -> None:
    run = Run(directory, budget=32)
    asked: dict[str, Parts] = {"one": ONE, "two": TWO, "three": [3, words(9, 14)]}
    for rid, parts in asked.items():
        run.send(rid, parts, n=2)
    begun = run.driver.output["resumed", 0] = reference.answer(FOUR)[:5]
    run.send("resumed", FOUR, attempt=1, resume=[Resume(0, pack_ints(begun))])
    for _ in range(6):
        run.driver.step()
    planner = run.driver.core.planner
    for req in [req for req in planner.running if not req.in_flight]:
        planner.retract(req)
    run.driver.core.memory.flush()
    run.driver.run()
    answers = {choice: tokens for choice, tokens in run.driver.output.items() if choice[0] != "resumed"}
    assert answers == {(rid, index): reference.answer(parts) for rid, parts in asked.items() for index in (0, 1)}
    assert run.driver.output["resumed", 0] == reference.answer(FOUR)
    assert run.driver.core.counters.retractions
    run.worker.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"size": {"height": 56, "width": 56}}, "is not the image_size 42"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan True is not supported"),
        ({"do_resize": False}, "do_resize False is not supported"),
    ],
)
def test_processors_that_are_not_supported_are_refused(
    directory: Path, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor_of() | change))
    with pytest.raises(ModelError, match=why):
        Run(tmp_path)


def test_the_processor_may_be_in_the_file_of_transformers_5(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).symlink_to(path)
    common = {"image_processor": processor_of(), "processor_class": "Gemma3Processor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(common))
    given, found = image_model(directory), image_model(tmp_path)
    assert given is not None
    assert found is not None
    assert given.form == found.form


def test_a_model_without_a_processor_takes_no_images(directory: Path, tmp_path: Path) -> None:
    for path in directory.iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).symlink_to(path)
    run = Run(tmp_path)
    assert run.worker.images is None
    assert run.worker.capacity.images is None
    run.worker.close()
