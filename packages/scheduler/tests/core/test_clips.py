"""Clips in prompts: groups of frames hit the prefix cache at their own time only, and lie where they may."""

from typing import Any

import msgspec
import pytest

from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.video import FramePixels, FrameSampling, VideoFormat
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.images import ImageNumbers
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

FRAME, TOKENS = 48, 4
SIZE = {"height": 2, "width": 2, "tokens": TOKENS, "frames": 2}
FORM = VideoFormat(
    frames=2,
    sampling=FrameSampling(per_second=2.0, min_frames=4, max_frames=8, to_last=False),
    size=FramePixels(min_pixels=1, max_pixels=4, clip_pixels=99),
    patch=1,
    resample=3,
    marker="",
    token="",
    token_id=FRAME,
    max_tokens=TOKENS,
)
ONE, OTHER = (bytes([number]) * 32 for number in (1, 2))


def driver(**forms: Any) -> Driver:
    capacity = msgspec.structs.replace(small_capacity(pages=64), **({"video": FORM} | forms))
    return Driver(capacity, CoreConfig(token_budget=7), executor=FakeExecutor(capacity))


def groups(*times: int, first: int = 2, clip: int = 2, **changes: Any) -> list[ImageInput]:
    """Return groups that follow each other, with hashes that take turns."""
    return [
        ImageInput(
            sha256=(ONE, OTHER)[number % 2], first=first + TOKENS * number, clip=clip, time=time, **(SIZE | changes)
        )
        for number, time in enumerate(times)
    ]


def asked(rid: str, images: list[ImageInput]) -> TokenizedGenerateReqInput:
    prompt = [1, 2, *[FRAME] * (TOKENS * len(images)), 3, 4]
    return request(rid, prompt, images=images, max_new_tokens=4, ignore_eos=True)


def cached(core: Driver, sent: TokenizedGenerateReqInput) -> int:
    """Run a request, and return its cached tokens."""
    before = core.core.counters.cached_tokens
    core.send(sent)
    core.run()
    assert core.output[sent.rid, 0] == core.answer(sent, 0)
    return core.core.counters.cached_tokens - before


def test_equal_groups_hit_up_to_the_first_at_another_time() -> None:
    core = driver()
    assert cached(core, asked("first", groups(0, 1, 2))) == 0
    assert cached(core, asked("again", groups(0, 1, 2))) == 12
    assert cached(core, asked("slower", groups(0, 2, 4))) == 4, "the page before the second group"


def test_a_group_has_a_number_for_each_time() -> None:
    numbers = ImageNumbers()
    assert [numbers.of("", ONE, time) for time in (0, 1, 0, 1)] == [-1, -2, -1, -2]
    assert numbers.of("", ONE) == -1


REFUSED = {
    "not from time 0": (groups(1), "another time than 0"),
    "back in time": (groups(0, 3, 2), "does not follow"),
    "beyond the tokens before it": (groups(0, 5), "does not follow"),
    "of no clip": (groups(0, clip=1), "does not follow"),
    "of another clip": ([*groups(0), *groups(1, first=6, clip=3)], "does not follow"),
    "with a time and no clip": (groups(0, 1, clip=-1), "another time than 0"),
    "of three frames": (groups(0, frames=3), "a size that the model does not take"),
    "too large": (groups(0, height=3), "is not in the place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_out_of_place_are_refused(name: str) -> None:
    images, why = REFUSED[name]
    core = driver()
    core.send(asked("bad", images))
    assert why in core.rejected["bad"].message


def test_groups_without_a_clip_stand_anywhere() -> None:
    core = driver()
    [first] = groups(0, clip=-1)
    second = msgspec.structs.replace(first, first=8)
    prompt = [1, 2, *[FRAME] * TOKENS, 3, 4, *[FRAME] * TOKENS, 5]
    core.send(request("stamped", prompt, images=[first, second], max_new_tokens=2, ignore_eos=True))
    core.run()
    assert len(core.output["stamped", 0]) == 2


def test_clips_are_refused_by_a_model_that_takes_none() -> None:
    core = driver(video=None)
    core.send(asked("clip", groups(0)))
    assert core.rejected["clip"].message == "this scheduler takes no clips"
