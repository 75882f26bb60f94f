"""Stop strings, compared with a naive search."""

import time

from hypothesis import given
from hypothesis import strategies as st

from tercet.detokenizer.choice import StopMatcher, StopStrings, stop_strings

few = st.text(alphabet="abc", max_size=6)


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Return (end, stop) of the first stop string to end in a text, the longest of those that end there."""
    ends = [(end, stop) for stop in stops if stop for end in range(len(text) + 1) if text[:end].endswith(stop)]
    return min(ends, key=lambda it: (it[0], -len(it[1])), default=None)


def naive_hold(text: str, stops: list[str]) -> int:
    """Return the number of characters at the end of a text that could still become a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if n and text.endswith(stop[:n])), default=0)


@given(pieces=st.lists(few, max_size=8), stops=st.lists(few, max_size=4))
def test_every_step_shows_what_the_plain_way_would(pieces: list[str], stops: list[str]) -> None:
    matcher, text, shown = StopMatcher(StopStrings(stops)), "", ""
    for piece in pieces:
        text += piece
        fed = matcher.feed(piece)
        shown += fed.text
        if found := naive(text, stops):
            end, stop = found
            assert (fed.matched, shown) == (stop, text[: end - len(stop)])
            return
        assert fed.matched is None
        assert shown == text[: len(text) - naive_hold(text, stops)]
        assert matcher.idle == (shown == text)
    assert shown + matcher.flush() == text


@given(pieces=st.lists(few, max_size=8), stops=st.lists(few, max_size=4))
def test_included_stops_end_the_text(pieces: list[str], stops: list[str]) -> None:
    matcher, shown = StopMatcher(StopStrings(stops), include_stop=True), ""
    for piece in pieces:
        fed = matcher.feed(piece)
        shown += fed.text
        if fed.matched is not None:
            assert (len(shown), fed.matched) == naive("".join(pieces), stops)
            return
    assert naive("".join(pieces), stops) is None


def test_a_stop_straddles_pieces_and_the_rest_of_its_piece_is_trimmed() -> None:
    matcher = StopMatcher(StopStrings(["</answer>"]))
    assert [matcher.feed(piece).text for piece in ("42<", "/ans", "x <", "/answ")] == ["42", "", "</ansx ", ""]
    fed = matcher.feed("er> and more")
    assert (fed.text, fed.matched) == ("", "</answer>")


def test_cost_grows_with_the_text_and_not_with_its_square() -> None:
    def seconds(length: int) -> float:
        matcher = StopMatcher(StopStrings(["a" * 500 + "b"]))
        start = time.process_time()
        for _ in range(length):
            assert matcher.feed("a").matched is None
        return time.process_time() - start

    seconds(1000)
    assert seconds(32_000) < 40 * seconds(2_000)  # 16 times the text; its square would be 256 times


def test_requests_with_the_same_stop_strings_share_an_automaton() -> None:
    assert stop_strings(("ab", "c")) is stop_strings(("ab", "c"))
    assert stop_strings(("ab", "c")) is not stop_strings(("c", "ab"))
