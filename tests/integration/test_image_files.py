"""Odd files in one prompt: a hundred tokens and their log-probabilities equal those of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from packages.scheduler.tests.models.vision import checkpoint, qwen_checkpoint
from tercet.protocol.messages.values import LogprobParams
from tests.integration.image_families import FAMILIES, Family, Parts, Reference, Run

TOKENS = 100
NARROW = "3x2000"
REFUSE_NARROW = ("Mistral 3", "Pixtral", "LLaVA", "LLaVA-OneVision", "Qwen")
"""Beginnings of the names of families that refuse an image with a side 200 times as long as the other."""


def _inputs(processor: Any, images: list[Image.Image]) -> dict[str, Any]:
    made = dict(processor(images=images, return_tensors="pt"))
    return {name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made}


def _other(architecture: str, processor: type, preprocessor: dict[str, Any], typed: str) -> Family:
    """Return a family whose checkpoint is written elsewhere, for `Reference`."""
    return replace(
        FAMILIES["Gemma 4"],
        architecture=f"{architecture}ForConditionalGeneration",
        processor=processor,
        preprocessor=preprocessor,
        inputs=_inputs,
        typed=typed,
    )


def _qwen(name: str) -> tuple[Family, Callable[[Path], Path]]:
    family = _other(name, Qwen2VLImageProcessorPil, qwen_checkpoint.processor_of(), "mm_token_type_ids")
    return family, lambda directory: qwen_checkpoint.write_qwen(directory, name, old=False)


MODELS: dict[str, tuple[Family, Callable[[Path], Path]]] = {
    name: (family, family.write)
    for name, family in FAMILIES.items()
    if name not in ("Idefics3", "InternVL 3.5", "LLaVA with SigLIP")  # the code of others
} | {
    "Gemma 3": (
        _other("Gemma3", Gemma3ImageProcessorPil, checkpoint.processor_of(), "token_type_ids"),
        checkpoint.write_gemma3,
    ),
    **{f"Qwen {name}": _qwen(name) for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_hundred_tokens_of_odd_files_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, write = MODELS[name]
    directory = write(tmp_path)
    reference, run = Reference(family, directory), Run(directory, budget=97)
    odd = "one pixel" if name.startswith(REFUSE_NARROW) else NARROW
    files: Parts = [odd, [5, 9], "cmyk", [6], "palette", [7], "alpha", [8], "exif 6", [9], "animated gif", [11, 4, 8]]
    asked: dict[str, Parts] = {"files": files, "text": [[9, 3, 5, 8]]}
    answers = run.answers(asked, max_new_tokens=TOKENS, logprobs=LogprobParams())
    run.worker.close()
    for rid, parts in asked.items():
        tokens, scores = reference.scored(run, parts, TOKENS)
        assert answers[rid] == tokens
        found = run.driver.logprobs[rid, 0]
        assert [found[position] for position in range(TOKENS)] == pytest.approx(scores, abs=2e-3)
    assert len({*answers["files"]}) > 3, "an answer of one token would prove little"
