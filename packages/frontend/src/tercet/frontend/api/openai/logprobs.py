"""Log-probabilities in the formats of chat and completions."""

import codecs
import math
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.model.token_bytes import TokenBytes, spelling
from tercet.protocol.messages.values import Logprobs, unpack_floats, unpack_ints

_MIN_LOGPROB = -9999.0
"""Value for a probability of zero, as in OpenAI's API, because JSON has no infinity."""
_SEARCH_WINDOW = 16
"""Maximum distance in characters at which a prompt token is searched for in the text."""

STEP_TOKENS = 16
"""Tokens whose log-probabilities are written in one step. With many alternatives each takes about 20 microseconds."""

Entry = tuple[float | None, list[tuple[int, float]]]
"""Log-probability of the chosen token (None for a prompt's first token), and its alternatives, most likely first."""


def entries(parts: Sequence[Logprobs], top: int | None = None) -> Iterator[Entry]:
    """Yield an entry for each token of consecutive parts, with all alternatives or the first `top`."""
    for part in parts:
        shown = part.top if top is None else min(top, part.top)
        top_ids, top_values = unpack_ints(part.top_ids), unpack_floats(part.top_logprobs)
        for place, chosen in enumerate(unpack_floats(part.chosen)):
            span = slice(place * part.top, place * part.top + shown)
            alternatives = [
                (token_id, max(value, _MIN_LOGPROB))
                for token_id, value in zip(top_ids[span], top_values[span], strict=True)
                if not math.isnan(value)
            ]
            yield None if math.isnan(chosen) else max(chosen, _MIN_LOGPROB), alternatives


class Members:
    """Members of a JSON array, serialized as they are added. Objects would take many times the memory."""

    def __init__(self) -> None:
        self._written = bytearray()

    def add(self, members: Sequence[Any]) -> None:
        if members:
            self._written += (b"," if self._written else b"") + orjson.dumps(members)[1:-1]

    def extend(self, more: "Members") -> None:
        """Append the members of another array."""
        self._written += (b"," if self._written and more._written else b"") + more._written

    def fragment(self) -> orjson.Fragment:
        """Return the array as a value for orjson."""
        return orjson.Fragment(b"".join((b"[", self._written, b"]")))


def joined(first: Members, second: Members) -> Members:
    """Return an array with the members of both."""
    both = Members()
    both.extend(first)
    both.extend(second)
    return both


def sliced(token_ids: Sequence[int], parts: Sequence[Logprobs]) -> Iterator[tuple[Sequence[int], Logprobs]]:
    """Yield the parts and their tokens in slices of at most `STEP_TOKENS`. The last slice may have fewer token ids."""
    place = 0
    for part in parts:
        count = len(unpack_floats(part.chosen))
        for start in range(0, count, STEP_TOKENS):
            end = min(start + STEP_TOKENS, count)
            own, others = slice(4 * start, 4 * end), slice(4 * part.top * start, 4 * part.top * end)
            piece = Logprobs(
                chosen=part.chosen[own],
                top=part.top,
                top_ids=part.top_ids[others],
                top_logprobs=part.top_logprobs[others],
            )
            yield token_ids[place + start : place + end], piece
        place += count


def chat_logprobs(
    names: TokenBytes, token_ids: Sequence[int], parts: Sequence[Logprobs], top: int | None = None
) -> dict[str, Any]:
    """Return `choices[].logprobs` of chat. Entries beyond `token_ids` are left out."""
    content = []
    for token_id, (chosen, alternatives) in zip(token_ids, entries(parts, top), strict=False):
        others = [_chat_token(names[each], value) for each, value in alternatives]
        content.append({**_chat_token(names[token_id], chosen), "top_logprobs": others})
    return {"content": content, "refusal": None}


def chat_logprob_steps(
    names: TokenBytes, token_ids: Sequence[int], parts: Sequence[Logprobs], top: int | None = None
) -> Steps[dict[str, Any]]:
    """Return `chat_logprobs` with its list serialized in steps."""
    content = Members()
    for ids, part in sliced(token_ids, parts):
        content.add(chat_logprobs(names, ids, [part], top)["content"])
        yield
    return {"content": content.fragment(), "refusal": None}


def _chat_token(data: bytes, value: float | None) -> dict[str, Any]:
    return {"token": spelling(data), "bytes": list(data), "logprob": value}


def prompt_offsets(names: TokenBytes, specials: Container[int], token_ids: Sequence[int], text: str) -> Iterator[int]:
    """Yield the offset in a prompt's text at which each of its tokens begins.

    The text contains neither the special tokens that the tokenizer adds nor the space that SentencePiece prepends.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    place = 0
    for token_id in token_ids:
        piece = decoder.decode(names[token_id])
        if not text.startswith(piece, place):
            if token_id in specials:
                piece = ""
            elif piece.startswith(" ") and text.startswith(piece[1:], place):
                piece = piece[1:]
            else:  # normalized, or unknown: find the next piece that is unchanged
                place = max(text.find(piece, place, place + len(piece) + _SEARCH_WINDOW), place)
        yield min(place, len(text))
        place += len(piece)


COMPLETION_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """Builder of `choices[].logprobs` of completions. Offsets continue from chunk to chunk of a choice.

    Tokens in `hidden` add nothing to the text. The first token begins at `offset`, after an echoed prompt.
    """

    def __init__(self, names: TokenBytes, hidden: Container[int] = (), offset: int = 0, top: int | None = None) -> None:
        self._names = names
        self._top = top
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def write(self, token_ids: Sequence[int], parts: Sequence[Logprobs]) -> dict[str, list[Any]]:
        """Return the fields for the next tokens. Entries beyond `token_ids` are left out.

        The chosen token is always among the alternatives, so there may be one more than requested.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, (chosen, alternatives) in zip(token_ids, entries(parts, self._top), strict=False):
            name = self._name(token_id)
            tokens.append(name)
            values.append(chosen)
            tops.append(None if chosen is None else {**self._named(alternatives), name: chosen})
            offsets.append(self._advance(token_id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _advance(self, token_id: int) -> int:
        """Advance by one token and return its offset, which is that of the character it completes."""
        offset, data = self._offset, self._names[token_id]
        if token_id in self._hidden:
            return offset
        mid_character = bool(self._decoder.getstate()[0])
        text = self._decoder.decode(data)
        self._offset += len(text)
        own_text = codecs.getincrementaldecoder("utf-8")("replace").decode(data) if mid_character else text
        return self._offset - len(own_text) if text.endswith(own_text) else offset

    def _named(self, alternatives: list[tuple[int, float]]) -> dict[str, float]:
        """Return the alternatives by name. If two tokens have the same spelling, the likelier one counts."""
        return {self._name(token_id): value for token_id, value in reversed(alternatives)}

    def _name(self, token_id: int) -> str:
        return spelling(self._names[token_id], "bytes:")


def echo_logprobs(
    names: TokenBytes,
    specials: Container[int],
    token_ids: Sequence[int],
    text: str,
    scores: Logprobs,
    top: int | None = None,
) -> Steps[dict[str, Members]]:
    """Write `choices[].logprobs` of an echoed prompt."""
    writer = CompletionLogprobs(names, top=top)
    written = {name: Members() for name in COMPLETION_FIELDS}
    offsets = prompt_offsets(names, specials, token_ids, text)
    for ids, part in sliced(token_ids, [scores]):
        fields = {**writer.write(ids, [part]), "text_offset": list(islice(offsets, len(ids)))}
        for name, values in fields.items():
            written[name].add(values)
        yield
    return written


def prompt_logprobs(
    names: TokenBytes, token_ids: Sequence[int], scores: Logprobs | None, top: int
) -> list[dict[str, dict[str, Any]] | None] | None:
    """Return `prompt_logprobs` in vLLM's format: each prompt token and the `top` most likely ones, by id.

    Schedulers report only the most likely tokens, so other tokens have no rank.
    """
    if scores is None:
        return None
    rows: list[dict[str, dict[str, Any]] | None] = []
    for token_id, (own, alternatives) in zip(token_ids, entries([scores]), strict=True):
        if own is None:
            rows.append(None)
            continue
        ranks = {each: rank for rank, (each, _) in enumerate(alternatives, 1)}
        values = {token_id: own, **dict(alternatives[:top])}
        rows.append(
            {
                str(each): {"logprob": value, "rank": ranks.get(each), "decoded_token": spelling(names[each])}
                for each, value in values.items()
            }
        )
    return rows


def prompt_logprob_steps(
    names: TokenBytes, token_ids: Sequence[int], scores: Logprobs | None, top: int
) -> Steps[orjson.Fragment | None]:
    """Return `prompt_logprobs` serialized in steps."""
    if scores is None:
        return None
    rows = Members()
    for ids, part in sliced(token_ids, [scores]):
        rows.add(prompt_logprobs(names, ids, part, top) or [])
        yield
    return rows.fragment()
