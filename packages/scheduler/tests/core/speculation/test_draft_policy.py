"""What is expected to be said next: by recurrence, by prediction, and how much of it is worth guessing."""

import random

import pytest

from tercet.protocol.messages.values import pack_ints, unpack_ints
from tercet.scheduler.core.speculation.draft_policy import (
    ASTRAY,
    LONGEST_PAUSE,
    LONGEST_SEARCHED,
    TOKEN,
    DraftPolicy,
    PredictedText,
    recurrence,
)


def after(tokens: list[int], most: int = 4) -> list[int]:
    return list(unpack_ints(recurrence(pack_ints(tokens), most)))


def test_what_followed_the_last_tokens_before_is_expected_again() -> None:
    assert after([7, 1, 2, 3, 50, 51, 52, 53, 54, 9, 1, 2, 3]) == [50, 51, 52, 53]
    assert after([7, 1, 2, 3, 50, 51, 9, 1, 2, 3]) == [50, 51, 9, 1]
    assert after([7, 1, 2, 3, 50, 9, 2, 3]) == []
    assert after([1, 2, 3]) == after([1, 2]) == after([1]) == after([]) == []


def test_the_longest_match_wins_and_then_the_latest() -> None:
    assert after([8, 8, 8, 1, 2, 3, 40, 9, 9, 1, 2, 3, 41, 6, 1, 2, 3], 1) == [41]
    like = [4, 5, 6, 1, 2, 3]
    assert after([*like, 40, 9, 9, 1, 2, 3, 41, *like], 1) == [40]


def test_a_circle_goes_on() -> None:
    assert after([1, 2, 3, 5, 5, 5, 5], 6) == [5] * 6
    assert after([7, 8, 9, 7, 8, 9], 7) == [7, 8, 9, 7, 8, 9, 7]


def test_a_place_between_two_tokens_is_none() -> None:
    """Tokens 1 1 1 and 256 256 256 have the same bytes, but for where they begin."""
    assert after([256, 256, 256, 256, 9, 9, 1, 1, 1]) == []
    assert after([1, 1, 1, 77, 78, 256, 256, 256, 256, 1, 1, 1], 2) == [77, 78]


def test_what_was_said_long_ago_is_not_looked_for() -> None:
    far = [1, 2, 3, 4, *[9] * (LONGEST_SEARCHED // TOKEN), 1, 2, 3]
    assert after(far) == []
    assert after(far[5:]) == []
    assert after([*far[6:-3], 1, 2, 3, 4, 5, 6, 1, 2, 3], 1) == [4]


@pytest.mark.parametrize("seed", range(20))
def test_recurrence_is_what_a_slow_search_finds(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(3) for _ in range(40)]
    ends = [end for end in range(3, len(tokens)) if tokens[end - 3 : end] == tokens[-3:]][-4:]

    def alike(end: int) -> int:
        """Of 3, 6, 12, 24 tokens the most that are the same."""
        sizes = [size for size in (3, 6, 12, 24, 48) if size <= end and tokens[end - size : end] == tokens[-size:]]
        return max(sizes)

    assert bool(after(tokens)) == bool(ends)
    if ends:
        best = max(ends, key=lambda end: (alike(end), end))
        followed = tokens[best:] * 40
        assert after(tokens, 9) == followed[:9]


class Reader:
    """A prediction beside the output that it is of."""

    def __init__(self, text: list[int]) -> None:
        self.prediction = PredictedText(pack_ints(text))
        self.output: list[int] = []

    def say(self, *tokens: int) -> list[int]:
        self.output += tokens
        return list(unpack_ints(self.prediction.rest(pack_ints(self.output), 3)))


def test_a_prediction_is_followed() -> None:
    reader = Reader([10, 11, 12, 13, 14])
    assert reader.say() == [10, 11, 12]
    assert reader.say(10) == [11, 12, 13]
    assert reader.say(11, 12) == [13, 14]
    assert reader.say(13, 14) == []
    assert reader.say(15) == []


def test_a_token_in_place_of_another_changes_nothing_else() -> None:
    reader = Reader([10, 11, 12, 13, 14, 15])
    assert reader.say(10, 99) == [12, 13, 14]
    assert reader.say(12) == [13, 14, 15]


def test_what_is_inserted_or_left_out_is_noticed_three_tokens_later() -> None:
    text = list(range(10, 40))
    longer = Reader(text)
    longer.say(10, 11, 98, 99, 12, 13)
    assert longer.say(14) == [15, 16, 17]
    shorter = Reader(text)
    shorter.say(10, 11, 20, 21)
    assert shorter.say(22) == [23, 24, 25]


def test_a_diverging_text_gets_no_prediction_until_it_matches_again() -> None:
    reader = Reader([10, 11, 12, 13, 14, 15])
    for token in range(50, 50 + ASTRAY - 1):
        assert reader.say(token)
    assert reader.say(60) == reader.say(61) == reader.say(62) == []
    reader.say(10, 11)
    assert reader.say(12) == [13, 14, 15]


def test_an_output_that_is_resumed_is_found_in_its_prediction() -> None:
    text = list(range(1000))
    reader = Reader(text)
    assert reader.say(*text[:700]) == [700, 701, 702]
    again = Reader(text)
    assert again.say(*text[:40]) == [40, 41, 42]


def test_width_follows_how_much_was_right() -> None:
    drafting = DraftPolicy()
    first = drafting.width
    assert 2 < first < 9
    drafting.learn(first, first)
    wider = drafting.width
    assert wider > first
    drafting.learn(wider, 1)
    assert 1 < drafting.width < wider
    for _ in range(20):
        drafting.learn(8, 8)
    assert 30 < drafting.width < 100
    for _ in range(20):
        drafting.learn(8, 0)
    assert drafting.width == 1


@pytest.mark.parametrize(("share", "least", "most"), [(0.5, 2, 5), (0.85, 7, 24), (0.95, 16, 64)])
def test_a_row_more_is_worth_it_as_long_as_it_is_right_one_time_in_ten(share: float, least: int, most: int) -> None:
    chance, drafting, widths = random.Random(1), DraftPolicy(), []
    for _ in range(400):
        drafted = min(8, drafting.width)
        right = next((place for place in range(drafted) if chance.random() > share), drafted)
        drafting.learn(drafted, right)
        widths.append(drafting.width)
    widths.sort()
    assert least <= widths[200] <= most


def test_misses_make_pauses_longer_and_a_hit_ends_them() -> None:
    drafting = DraftPolicy()
    pauses = []
    for _ in range(9):
        drafting.learn(2, 0)
        pauses.append(drafting.pause)
    assert pauses == [0, 2, 4, 8, 16, *[LONGEST_PAUSE] * 4]
    assert drafting.width == 1
    drafting.learn(1, 1)
    assert drafting.pause == 0
