"""Places of clips in prompts."""

import pytest

from packages.frontend.tests.media.video.video_forms import JOINED, STAMPED
from tercet.frontend.errors import BadRequestError
from tercet.frontend.manager.inputs.images import MAX_ARRAYS, images_in, placed_images
from tercet.frontend.media.video.decoder import DecodedGroup, DecodedVideo
from tercet.frontend.model.prompts import TextPrompt

PROMPT = TextPrompt("", param="prompt")
TOKEN = STAMPED.token_id


def clip(*times: int) -> DecodedVideo:
    """Return a clip of groups of two tokens."""
    return DecodedVideo(
        [
            DecodedGroup(array=bytes([time]), height=16, width=32, seconds=0.0, time=time, sha256=bytes([time]) * 32)
            for time in times
        ]
    )


def test_groups_that_follow_each_other_name_the_first_token_of_their_clip() -> None:
    ids = [1, *[TOKEN] * 4, 2, *[TOKEN] * 2]
    placed = placed_images([clip(0, 3), clip(0)], PROMPT, ids, None, JOINED)
    found = [(each.first, each.tokens, each.clip, each.time) for each in images_in([each.place for each in placed])]
    assert found == [(1, 2, 1, 0), (3, 2, 1, 3), (6, 2, 6, 0)]
    assert [each.array for each in placed] == [b"\0", b"\3", b"\0"]


def test_groups_with_stamps_stand_for_themselves() -> None:
    ids = [1, *[TOKEN] * 2, 2, *[TOKEN] * 2]
    placed = placed_images([clip(0, 1)], PROMPT, ids, None, STAMPED)
    found = [(each.first, each.clip, each.time) for each in images_in([each.place for each in placed])]
    assert found == [(1, -1, 0), (4, -1, 0)]


def test_tokens_of_clips_that_a_text_writes_are_refused() -> None:
    with pytest.raises(BadRequestError, match="writes tokens of images or videos besides"):
        placed_images([clip(0)], PROMPT, [TOKEN] * 3, None, STAMPED)


def test_more_groups_than_a_message_has_frames_are_refused() -> None:
    most = clip(*[0] * (MAX_ARRAYS // 2))
    ids = [TOKEN] * (2 * MAX_ARRAYS)
    assert len(placed_images([most, most], PROMPT, ids, None, STAMPED)) == MAX_ARRAYS
    with pytest.raises(BadRequestError, match=f"{MAX_ARRAYS + 1} arrays"):
        placed_images([most, most, clip(0)], PROMPT, [*ids, TOKEN, TOKEN], None, STAMPED)
