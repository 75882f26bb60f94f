"""Segments of a transcript: text between two tokens of time."""

from collections.abc import Sequence

import msgspec

from tercet.protocol.messages.audio import TranscriptTokens


class Segment(msgspec.Struct, frozen=True):
    """Tokens of text, with times in seconds from the start of the file, and the mean of their log-probabilities.

    `place` is the index of the first among the tokens of its window.
    """

    start: float
    end: float
    token_ids: list[int]
    logprob: float
    place: int


def segments_of(
    ids: Sequence[int], logprobs: Sequence[float], tokens: TranscriptTokens, end_id: int, first: float, last: float
) -> list[Segment]:
    """Return the segments of a window that lasts from `first` to `last`, in seconds. Silent ones are left out.

    The last segment of a window may have no time at its end.
    """
    found: list[Segment] = []
    text: list[int] = []
    scores: list[float] = []
    begun = first

    def close(end: float, place: int) -> None:
        if text:
            found.append(Segment(begun, max(begun, end), [*text], sum(scores) / len(scores), place - len(text)))
        text.clear()
        scores.clear()

    for place, (token, score) in enumerate(zip(ids, logprobs, strict=True)):
        if token >= tokens.first_timestamp:
            time = min(last, first + (token - tokens.first_timestamp) * tokens.timestamp_seconds)
            close(time, place)
            begun = time
        elif token != end_id:
            text.append(token)
            scores.append(score)
    close(last, len(ids) - (end_id in ids[-1:]))
    return found


def clock(seconds: float, comma: str) -> str:
    """Return a time as subtitles have it: hours, minutes, seconds and, after a `comma`, milliseconds."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{comma}{milliseconds:03}"


def srt(texts: Sequence[tuple[Segment, str]]) -> str:
    """Return segments in SubRip's format."""
    return "".join(
        f"{number}\n{clock(each.start, ',')} --> {clock(each.end, ',')}\n{_line(text)}\n\n"
        for number, (each, text) in enumerate(texts, start=1)
    )


def vtt(texts: Sequence[tuple[Segment, str]]) -> str:
    """Return segments in the format WebVTT."""
    cues = [f"{clock(each.start, '.')} --> {clock(each.end, '.')}\n{_line(text)}\n\n" for each, text in texts]
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    """Return a text as one line of subtitles, in which no arrow looks like that between times."""
    return " ".join(text.split()).replace("-->", "->")
