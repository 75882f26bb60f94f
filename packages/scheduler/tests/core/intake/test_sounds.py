"""Sounds in prompts: places that the core accepts."""

from typing import Any

import msgspec
import pytest

from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import FixedSize, ImageFormat, ImageInput
from tercet.scheduler.testing import Driver, request, small_capacity

SOUND, TOKENS = 40, 3
FORM = SoundFormat(rate=100, hop=1, samples=20, marker="", token="", token_id=SOUND)
IMAGES = ImageFormat(
    size=FixedSize(height=1, width=3), patch=1, resample=2, marker="", token="", token_id=SOUND, max_tokens=3
)
PLACE: dict[str, Any] = {"sha256": b"c" * 32, "samples": 12, "first": 1, "tokens": TOKENS}
PROMPT = [1, *[SOUND] * TOKENS, 2]


@pytest.mark.parametrize(("samples", "tokens"), [(3, 1), (4, 1), (6, 1), (7, 2), (8, 2), (12, 3), (20, 5)])
def test_a_token_stands_for_four_features(samples: int, tokens: int) -> None:
    assert FORM.fits(samples)
    assert FORM.embeddings(samples) == tokens
    assert tokens <= FORM.max_tokens


@pytest.mark.parametrize("samples", [-1, 0, 2, 21])
def test_sounds_without_tokens_and_long_ones_do_not_fit(samples: int) -> None:
    assert not FORM.fits(samples)


def test_a_sound_in_its_place_is_accepted() -> None:
    core = Driver(msgspec.structs.replace(small_capacity(), sounds=FORM))
    core.send(request("r", PROMPT, sounds=[SoundInput(**PLACE)], max_new_tokens=2, ignore_eos=True))
    core.run()
    assert core.rejected == {}
    assert len(core.output["r", 0]) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha256": b"c"}, "no place"),
        ({"first": 4}, "no place"),
        ({"first": 0}, "not in the place"),
        ({"samples": 21}, "size"),
        ({"samples": 2}, "size"),
        ({"samples": 8}, "not in the place"),
        ({"tokens": 6}, "no place"),
    ],
)
def test_sounds_out_of_place_are_rejected(change: dict[str, Any], why: str) -> None:
    core = Driver(msgspec.structs.replace(small_capacity(), sounds=FORM))
    core.send(request("r", PROMPT, sounds=[SoundInput(**{**PLACE, **change})]))
    assert why in core.rejected["r"].message


def test_a_scheduler_that_takes_no_sounds_rejects_them() -> None:
    core = Driver(small_capacity(images=IMAGES))
    core.send(request("r", PROMPT, sounds=[SoundInput(**PLACE)]))
    assert "takes no sounds" in core.rejected["r"].message


def test_a_request_has_images_or_sounds() -> None:
    core = Driver(msgspec.structs.replace(small_capacity(images=IMAGES), sounds=FORM))
    image = ImageInput(sha256=b"d" * 32, height=1, width=3, first=1, tokens=3)
    core.send(request("r", PROMPT, sounds=[SoundInput(**PLACE)], images=[image]))
    assert "images and sounds" in core.rejected["r"].message
