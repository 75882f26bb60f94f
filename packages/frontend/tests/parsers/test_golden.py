"""Every transcript is read as expected, with any cuts between pieces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.frontend.tests.parsers.transcripts import FILES, TRANSCRIPTS, Transcript, read

each = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=[transcript.title for transcript in TRANSCRIPTS])


@each
def test_a_transcript_at_once(transcript: Transcript) -> None:
    assert read(transcript.parser(), [transcript.output]) == transcript.found


@each
def test_a_transcript_character_by_character(transcript: Transcript) -> None:
    assert read(transcript.parser(), list(transcript.output)) == transcript.found


@each
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_transcript_in_any_pieces(transcript: Transcript, data: st.DataObject) -> None:
    places = st.sets(st.integers(0, len(transcript.output)), max_size=12)
    cuts = [0, *sorted(data.draw(places)), len(transcript.output)]
    pieces = [transcript.output[a:b] for a, b in pairwise(cuts)]
    assert read(transcript.parser(), pieces) == transcript.found


def test_there_are_transcripts_of_everything() -> None:
    by_file = {path.stem: sum(each.title.startswith(path.stem + ":") for each in TRANSCRIPTS) for path in FILES}
    assert all(count >= 3 for count in by_file.values())
    assert len(by_file) >= 16
