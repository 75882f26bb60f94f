"""The reader and its markers."""

import re
from collections.abc import Generator

import pytest

from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps


def run(reader: Reader, steps: Steps[str], *pieces: str) -> str:
    """Feed pieces while the steps ask for more, then end; return the result of the steps."""
    waiting = list(pieces)
    try:
        while True:
            next(steps)
            if waiting:
                reader.push(waiting.pop(0))
            else:
                reader.end()
    except StopIteration as stop:
        return str(stop.value)


def test_the_longer_marker_wins_where_one_ends_with_another() -> None:
    for pieces in (["ab\n<x>c"], list("ab\n<x>c")):
        reader, out = Reader(), list[str]()
        assert run(reader, reader.until(Markers("\n<x>", "<x>"), out.append), *pieces) == "\n<x>"
        assert "".join(out) == "ab"


def test_markers_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="contains another"):
        Markers("<tool>", "<tool>s")


def test_held_text_is_given_back_as_it_was_written() -> None:
    reader = Reader()
    reader.push("a b<c>d")
    reader.hold("begun ")
    assert run(reader, reader.spaces()) == ""
    assert run(reader, reader.until(Markers("<c>"), lambda _: None)) == "<c>"
    assert reader.release() == "begun a b<c>"
    assert reader.release() == ""


@pytest.mark.parametrize("pieces", [["aaaaaab"], list("aaaaaab")])
def test_a_limit_is_met_at_the_same_place_in_any_pieces(pieces: list[str]) -> None:
    reader = Reader()
    reader.hold()
    with pytest.raises(MalformedError):
        run(reader, reader.run(re.compile("a+"), 4), *pieces)
    assert reader.release() == "aaaa"


@pytest.mark.parametrize("pieces", [["aaaaaab"], list("aaaaaab")])
def test_no_more_is_held_than_there_is_room_for(pieces: list[str]) -> None:
    reader = Reader()
    reader.hold("xx", 5)
    with pytest.raises(MalformedError):
        run(reader, reader.run(re.compile("a+")), *pieces)
    assert reader.release() == "xxaaa"
    assert run(reader, reader.run(re.compile("a+")), *pieces[4:], "b") == "aaa"


def test_accept_waits_only_while_it_may_still_come_true() -> None:
    reader = Reader()
    steps: Generator[None, None, bool] = reader.accept("</x>")
    next(steps)
    reader.push("</")
    next(steps)
    reader.push("y")
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value is False
    assert run(reader, reader.run(re.compile("[^a]+"))) == "</y"
