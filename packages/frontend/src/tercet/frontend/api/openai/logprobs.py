"""Log-probabilities as the two OpenAI formats write them."""

import codecs
import math
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import Any

import orjson

from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.model.token_bytes import TokenBytes, spelling
from tercet.protocol.messages.values import FinishReason, Logprobs, unpack_floats, unpack_ints

_LOWEST = -9999.0
"""What OpenAI writes for a probability of zero: JSON has no infinity."""
_NEAR = 16
"""Characters beyond which a token of a prompt is not looked for."""

STEP_TOKENS = 16
"""Tokens whose log-probabilities are written in one step: with many alternatives each takes some 20 microseconds."""

Entry = tuple[float | None, list[tuple[int, float]]]
"""The chosen token's log-probability (None for a prompt's first token), and the alternatives, most likely first."""


def entries(parts: Sequence[Logprobs], top: int | None = None) -> Iterator[Entry]:
    """One entry for each token of consecutive parts, with all alternatives there are or the first `top`."""
    for part in parts:
        shown = part.top if top is None else min(top, part.top)
        top_ids, top_values = unpack_ints(part.top_ids), unpack_floats(part.top_logprobs)
        for place, chosen in enumerate(unpack_floats(part.chosen)):
            span = slice(place * part.top, place * part.top + shown)
            alternatives = [
                (token_id, max(value, _LOWEST))
                for token_id, value in zip(top_ids[span], top_values[span], strict=True)
                if not math.isnan(value)
            ]
            yield None if math.isnan(chosen) else max(chosen, _LOWEST), alternatives


class Members:
    """The members of a JSON array, written as they come: what is kept as objects takes many times the memory."""

    def __init__(self) -> None:
        self._written = bytearray()

    def add(self, members: Sequence[Any]) -> None:
        """Write more members at the end."""
        if members:
            self._written += (b"," if self._written else b"") + orjson.dumps(members)[1:-1]

    def extend(self, more: "Members") -> None:
        """Add those of another array."""
        self._written += (b"," if self._written and more._written else b"") + more._written

    def fragment(self) -> orjson.Fragment:
        """Return the array as a value for orjson."""
        return orjson.Fragment(b"".join((b"[", self._written, b"]")))


def joined(first: Members, second: Members) -> Members:
    """Return the members of both."""
    both = Members()
    both.extend(first)
    both.extend(second)
    return both


def sliced(token_ids: Sequence[int], parts: Sequence[Logprobs]) -> Iterator[tuple[Sequence[int], Logprobs]]:
    """Yield consecutive parts and their tokens, `STEP_TOKENS` of them at the most; the last may have fewer tokens."""
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


def without_end(token_ids: Sequence[int], finish: FinishReason | None) -> Sequence[int]:
    """The tokens of an answer's text: a token that only said that the answer ends is none of it."""
    if finish is not None and len(token_ids) and finish.matched == token_ids[-1]:
        return token_ids[:-1]
    return token_ids


def chat_logprobs(
    names: TokenBytes, token_ids: Sequence[int], parts: Sequence[Logprobs], top: int | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of chat; entries beyond `token_ids` are left out."""
    content = []
    for token_id, (chosen, alternatives) in zip(token_ids, entries(parts, top), strict=False):
        others = [_chat_token(names[each], value) for each, value in alternatives]
        content.append({**_chat_token(names[token_id], chosen), "top_logprobs": others})
    return {"content": content, "refusal": None}


def chat_logprob_steps(
    names: TokenBytes, token_ids: Sequence[int], parts: Sequence[Logprobs], top: int | None = None
) -> Steps[dict[str, Any]]:
    """Do what `chat_logprobs` does, in steps; the list is written."""
    content = Members()
    for ids, part in sliced(token_ids, parts):
        content.add(chat_logprobs(names, ids, [part], top)["content"])
        yield
    return {"content": content.fragment(), "refusal": None}


def _chat_token(data: bytes, value: float | None) -> dict[str, Any]:
    return {"token": spelling(data), "bytes": list(data), "logprob": value}


def prompt_offsets(names: TokenBytes, specials: Container[int], token_ids: Sequence[int], text: str) -> Iterator[int]:
    """Where in a prompt's text each of its tokens begins.

    What a tokenizer puts around a text, and the space that SentencePiece puts before it, are nowhere in the text.
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
            else:  # normalized, or of an unknown token: the next that is spelt as it stands there is found again
                place = max(text.find(piece, place, place + len(piece) + _NEAR), place)
        yield min(place, len(text))
        place += len(piece)


COMPLETION_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """`choices[].logprobs` of completions, whose offsets run on from chunk to chunk of one choice.

    Tokens that are `hidden` leave nothing in the text. The first begins at `offset`: behind a prompt that is echoed.
    """

    def __init__(self, names: TokenBytes, hidden: Container[int] = (), offset: int = 0, top: int | None = None) -> None:
        self._names = names
        self._top = top
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def write(self, token_ids: Sequence[int], parts: Sequence[Logprobs]) -> dict[str, list[Any]]:
        """The next tokens; entries beyond `token_ids` are left out.

        The chosen token is among its alternatives, which makes one more than asked for.
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
            offsets.append(self._passed(token_id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _passed(self, token_id: int) -> int:
        """Where a token of the output begins: behind what breaks off before it, at the character that it completes."""
        offset, data = self._offset, self._names[token_id]
        if token_id in self._hidden:
            return offset
        begun = bool(self._decoder.getstate()[0])
        text = self._decoder.decode(data)
        self._offset += len(text)
        alone = codecs.getincrementaldecoder("utf-8")("replace").decode(data) if begun else text
        return self._offset - len(alone) if text.endswith(alone) else offset

    def _named(self, alternatives: list[tuple[int, float]]) -> dict[str, float]:
        """By name; where two tokens are spelt alike the likelier one counts."""
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
    """Write `choices[].logprobs` of a prompt that is echoed."""
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
    """`prompt_logprobs` as vLLM writes them: each token of a prompt, then the `top` likeliest in its place, by id.

    How many tokens are likelier schedulers do not tell: only what is among the likeliest has a rank.
    """
    if scores is None:
        return None
    told: list[dict[str, dict[str, Any]] | None] = []
    for token_id, (own, alternatives) in zip(token_ids, entries([scores]), strict=True):
        if own is None:
            told.append(None)
            continue
        ranks = {each: rank for rank, (each, _) in enumerate(alternatives, 1)}
        values = {token_id: own, **dict(alternatives[:top])}
        told.append(
            {
                str(each): {"logprob": value, "rank": ranks.get(each), "decoded_token": spelling(names[each])}
                for each, value in values.items()
            }
        )
    return told


def prompt_logprob_steps(
    names: TokenBytes, token_ids: Sequence[int], scores: Logprobs | None, top: int
) -> Steps[orjson.Fragment | None]:
    """Do what `prompt_logprobs` does, in steps; the list is written."""
    if scores is None:
        return None
    told = Members()
    for ids, part in sliced(token_ids, [scores]):
        told.add(prompt_logprobs(names, ids, part, top) or [])
        yield
    return told.fragment()
