"""Tiny random models that take clips, whole from video files to answers, here and in transformers."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from packages.frontend.tests.media.image_files import noise, saved
from packages.frontend.tests.media.video.video_files import video
from packages.scheduler.tests.models.vision.qwen_checkpoint import IMAGE, MERGE, PATCH, START, VIDEO, processor_of
from tercet.frontend.manager.inputs.images import PlacedImage, images_in, placed_images
from tercet.frontend.media.image_decoder import DecodedImage, digest_of
from tercet.frontend.media.image_pipe import Decode
from tercet.frontend.media.image_worker import decoded_image
from tercet.frontend.media.prompt_media import Decoded, replacements_of
from tercet.frontend.media.video.decoder import DecodedGroup, DecodedVideo, group_digest
from tercet.frontend.media.video.pipe import ReadVideo
from tercet.frontend.media.video.worker import clip_groups
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.protocol.messages.values import ModelLimits
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.testing import Driver, request
from tests.integration.video_processors import QWEN2, patches_of

ANSWER = 10
CLIPS: Mapping[str, dict[str, Any]] = {
    "clip": {"frames": 20, "size": (40, 24)},
    "tall": {"frames": 12, "size": (24, 48)},
    "still": {"frames": 20, "size": (40, 24), "blank": True},
    "long": {"frames": 70, "size": (24, 24)},
}
"""Video files. `long` has more time than rows and columns."""
IMAGES: Mapping[str, tuple[int, int]] = {"square": (32, 32), "wide": (56, 20)}
Parts = Sequence[str | list[int]]
"""Names of clips and images, and runs of token ids."""


@cache
def clip_file(name: str) -> bytes:
    return video(**CLIPS[name])


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, START), k=count)


class Prompt(NamedTuple):
    """Tokens of a prompt, its media, and their places and arrays."""

    ids: list[int]
    media: list[Decoded]
    placed: list[PlacedImage]


class Run:
    """Core over a real worker, which gets clips and images as the frontend makes them."""

    def __init__(self, directory: Path, *, budget: int = 1024, **options: Any) -> None:
        made: dict[str, Any] = {"device": "cpu", "slots": 8, "page_size": 4, "kv_cache_bytes": 1 << 24}
        self.worker = TpModelWorker(WorkerOptions(model=directory, **(made | options)))
        capacity = self.worker.capacity
        self.driver = Driver(capacity, CoreConfig(token_budget=budget), executor=self.worker)
        self._tokenizer = PromptTokenizer((directory / "tokenizer.json").read_text())
        self.limits = ModelLimits(
            model="",
            context_length=capacity.context_length,
            vocab_size=capacity.vocab_size,
            max_total_tokens=capacity.context_length,
            images=capacity.images,
            video=capacity.video,
        )

    def decoded(self, name: str) -> Decoded:
        if name in IMAGES:
            form = self.limits.images
            assert form is not None
            file = saved(noise(*IMAGES[name], seed=len(name)))
            made = decoded_image(Decode(file=file, size=form.size, patch=form.patch, resample=form.resample, seconds=5))
            return DecodedImage(array=made.array, height=made.height, width=made.width, sha256=digest_of(made))
        video_form = self.limits.video
        assert video_form is not None
        groups = clip_groups(ReadVideo(file=clip_file(name), form=video_form, seconds=5))
        return DecodedVideo(
            [
                DecodedGroup(
                    array=each.array,
                    height=each.height,
                    width=each.width,
                    seconds=each.seconds,
                    time=each.time,
                    sha256=group_digest(each),
                )
                for each in groups
            ]
        )

    def prompt(self, parts: Parts) -> Prompt:
        ids: list[int] = [1]
        media: list[Decoded] = []
        for part in parts:
            if isinstance(part, str):
                media.append(shown := self.decoded(part))
                [[text]] = replacements_of([shown], self.limits).values()
                ids += self._tokenizer.encode(text, add_special_tokens=False)
            else:
                ids += part
        placed = placed_images(media, TextPrompt("", param="prompt"), ids, self.limits.images, self.limits.video)
        return Prompt(ids, media, placed)

    def send(self, rid: str, parts: Parts, **more: Any) -> None:
        prompt = self.prompt(parts)
        given = {"max_new_tokens": ANSWER, "ignore_eos": True, "temperature": 0.0}
        images = images_in([each.place for each in prompt.placed])
        asked = request(rid, prompt.ids, images=images, **(given | more))
        if images:
            assert self.worker.images is not None
            assert self.worker.images.add(images, [each.array for each in prompt.placed]) == ""
        self.driver.send(asked)

    def answers(self, requests: Mapping[str, Parts], **more: Any) -> dict[str, list[int]]:
        """Return the answers to requests that run side by side."""
        for rid, parts in requests.items():
            self.send(rid, parts, **more)
        self.driver.run()
        return {rid: self.driver.output[rid, 0] for rid in requests}


class Reference:
    """transformers' `generate`."""

    def __init__(self, family: str, directory: Path) -> None:
        kind = getattr(transformers, f"{family}ForConditionalGeneration")
        self._family = family
        self._model: Any = kind.from_pretrained(directory, attn_implementation="eager")
        self._known: dict[str, list[int]] = {}

    def answer(self, run: Run, parts: Parts, tokens: int = ANSWER) -> list[int]:
        key = repr(parts)
        if len(self._known.get(key, ())) < tokens:
            prompt = run.prompt(parts)
            self._known[key] = self.continued(run, prompt.ids, prompt.media, tokens)
        return self._known[key][:tokens]

    @torch.inference_mode()
    def continued(self, run: Run, prompt: Sequence[int], media: Sequence[Decoded], tokens: int) -> list[int]:
        """Return the tokens after a prompt with these images and clips."""
        ids = torch.tensor([prompt])
        given: dict[str, Any] = {}
        if media:
            types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
            given = self.inputs(run, media) | {"mm_token_type_ids": types}
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            **given,
        )
        found: list[int] = out[0, ids.shape[1] :].tolist()
        assert len({*found}) > 2, "an answer of one token would prove little"
        return found

    @torch.inference_mode()
    def continued_at(self, run: Run, parts: Parts, step: float) -> list[int]:
        """Return the tokens after text, one clip and text, at the positions of transformers 4.

        They go on from the largest part, also of time. Groups are so many positions apart.
        """
        prompt = run.prompt(parts)
        [clip] = [each for each in prompt.media if isinstance(each, DecodedVideo)]
        first, square = prompt.ids.index(VIDEO), PATCH * MERGE
        rows, columns = clip.groups[0].height // square, clip.groups[0].width // square
        times = (torch.arange(len(clip.groups)) * step).long()
        grid = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
        shown = torch.stack(grid).reshape(3, -1) + first
        ids, given = list(prompt.ids), self.inputs(run, prompt.media)
        for _ in range(ANSWER):
            after = torch.arange(len(ids) - first - shown.shape[1]) + shown.max() + 1
            positions = torch.cat([torch.arange(first).expand(3, -1), shown, after.expand(3, -1)], 1)
            out = self._model(torch.tensor([ids]), position_ids=positions[:, None], use_cache=False, **given)
            ids.append(int(out.logits[0, -1].argmax()))
        return ids[len(prompt.ids) :]

    def inputs(self, run: Run, media: Sequence[Decoded]) -> dict[str, Any]:
        """Return the inputs of transformers' model beside token ids."""
        given: dict[str, Any] = {}
        images = [[_array(each.array, 1, each)] for each in media if isinstance(each, DecodedImage)]
        clips = [each for each in media if isinstance(each, DecodedVideo)]
        if images:
            given["pixel_values"], given["image_grid_thw"] = _patches([np.concatenate(each * 2) for each in images])
        if clips:
            frames = [np.concatenate([_array(each.array, 2, each) for each in clip.groups]) for clip in clips]
            given["pixel_values_videos"], given["video_grid_thw"] = _patches(frames)
        if clips and self._family == "Qwen2_5_VL":
            names = [each for each in CLIPS for clip in clips if clip == run.decoded(each)]
            given["second_per_grid_ts"] = [seconds_between_groups(name) for name in names]
        return given


def seconds_between_groups(name: str) -> float:
    """Return the seconds from one group of a clip to the next."""
    frames = int(CLIPS[name]["frames"])
    shown = max(4, frames // 10 * 2)  # at two frames a second, of ten
    return 2 * frames / (shown * 10)


def _array(array: bytes, frames: int, size: Any) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.frombuffer(array, np.uint8).reshape(frames, size.height, size.width, 3)


def _patches(clips: "Sequence[np.ndarray[Any, np.dtype[np.uint8]]]") -> tuple[torch.Tensor, torch.Tensor]:
    """Return patches and grids of clips, [frames, height, width, 3] each, as transformers' processors make them."""
    processor = processor_of()
    made = [
        patches_of(QWEN2, clip, processor["image_mean"], processor["image_std"], patch=PATCH, merge=MERGE)
        for clip in clips
    ]
    return torch.cat([patches for patches, _ in made]), torch.tensor([grid for _, grid in made])
