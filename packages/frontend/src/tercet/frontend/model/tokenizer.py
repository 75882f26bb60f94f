"""Tokenizer that never turns a client's text into special tokens.

Text of the template and of the client arrive as one rendered string, so a typed "<|im_end|>" would end the message that
contains it. Therefore `escape_special` inserts a *mark*, a random string, into every control token in the client's text
before the template is rendered. Other text is unchanged, so string operations of templates work. The mark is an added
token of this copy of the tokenizer: it splits the text there, and `encode` drops its id. The cost is a single pass over
the text.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.input_layout import layout_of
from tercet.protocol.json_files import parse_json

_ROLE_MARKER = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
"""Added tokens of this form structure a chat even if the tokenizer does not declare them special."""


_LONG_TOKEN = 64
"""Minimum length in characters assumed for the longest token: unknown words may become a single token."""


_LOSSLESS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})
"""Pre-tokenizers that keep the whole text unless their `behavior` is "Removed"."""


class PromptTokenizer:
    """Tokenizer of prompts, from a tokenizer.json. Thread-safe.

    Texts are encoded as batches of one, since the library releases the GIL only for batches, and a long prompt must not
    block the event loop.
    """

    def __init__(self, tokenizer_json: str) -> None:
        file = parse_json(tokenizer_json)
        self._tokenizer = _read(tokenizer_json)
        self.layout = layout_of(self._tokenizer, pair=False)
        """Layout of a single input of an encoder."""
        self.pair_layout = layout_of(self._tokenizer, pair=True)
        self._mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control = {
            i: token.content for i, token in added.items() if token.special or _ROLE_MARKER.fullmatch(token.content)
        }
        self._normalized = {i for i in self.control if added[i].normalized}
        self._single_char_controls = [text for text in self.control.values() if len(text) == 1]
        self._control_pattern = _lookahead(text for text in self.control.values() if len(text) > 1)
        self._control_prefixes = frozenset(text[:end] for text in self.control.values() for end in range(1, len(text)))
        self._longest_prefix = max(map(len, self._control_prefixes), default=0)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._max_token_chars = max([_LONG_TOKEN, *map(len, vocabulary)])
        self._max_token_bytes = _max_token_bytes(json.loads(tokenizer_json), vocabulary)
        self._tokenizer = _with_mark(self._tokenizer, tokenizer_json, self._mark)
        self._mark_id = self._tokenizer.token_to_id(self._mark)
        has_offsets = bool(self._normalized)
        self._encode_batch = self._tokenizer.encode_batch if has_offsets else self._tokenizer.encode_batch_fast
        self.decoder_types = _decoder_types(file.get("decoder"))

    def escape_special(self, text: str, *, param: str | None = None) -> str:
        """Insert a mark into every control token, and after a suffix that following text could complete to one."""
        for single in self._single_char_controls:
            if single in text:
                raise BadRequestError(f"The text contains {single!r}, which this model reserves.", param=param)
        if self._control_pattern is not None:
            text = self._control_pattern.sub(rf"\g<0>{self._mark}", text)
        if self._could_be_completed(text):
            text += self._mark
        return text

    def replace_control(self, text: str, token: str, by: Sequence[str]) -> str | None:
        """Replace a control token wherever it is not marked, by one text at each place.

        Return None if these are not as many as the texts.
        """
        parts = re.split(f"{re.escape(token)}(?!{re.escape(self._mark)})", text, maxsplit=len(by) + 1)
        if len(parts) != len(by) + 1:
            return None
        return "".join(chain.from_iterable(zip(parts, [*by, ""], strict=True)))

    def unescape(self, text: str) -> str:
        """Remove the marks."""
        return text.replace(self._mark, "")

    def _could_be_completed(self, text: str) -> bool:
        return any(
            text[-size:] in self._control_prefixes for size in range(1, min(self._longest_prefix, len(text)) + 1)
        )

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens without tokenizing."""
        if len(text) > self._max_token_chars and self._mark in text:
            text = self.unescape(text)
        if self._max_token_bytes and text.isascii():
            return -(-len(text) // self._max_token_bytes)
        return len(text) // self._max_token_chars

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of rendered text. Raises BadRequestError if escaped text normalizes to a control token."""
        [encoding] = self._encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if self._normalized and not self._normalized.isdisjoint(ids):
            for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
                if token_id in self._normalized and start != end and self.control[token_id] not in text[start:end]:
                    raise BadRequestError(f"The text spells the reserved {self.control[token_id]!r} in another way.")
        if self._mark in text:
            return [token_id for token_id in ids if token_id != self._mark_id]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool, param: str | None = None) -> str:
        """Return the text of ids. Raises BadRequestError, naming `param`, for an id outside the vocabulary."""
        for token_id in ids:
            if not self.has(token_id):
                raise BadRequestError(f"{token_id} is not a token id of this model.", param=param)
        [text] = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def has(self, token_id: int) -> bool:
        """Return whether the vocabulary has the id; models may have more rows (padded embeddings)."""
        return 0 <= token_id < self.vocab_size and token_id != self._mark_id

    def token(self, token_id: int) -> str:
        """Return the vocabulary's spelling of a token; empty for unknown ids and for the mark."""
        return (self._tokenizer.id_to_token(token_id) or "") if self.has(token_id) else ""


def _read(tokenizer_json: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _max_token_bytes(file: dict[str, Any], vocabulary: Iterable[str]) -> int:
    """Return the bytes of the longest token if every byte of ASCII text becomes part of a token, else 0.

    The condition holds for byte-level BPE with all bytes in its vocabulary and a normalizer that keeps ASCII. Added
    tokens that strip surrounding white space have no maximum length.
    """
    model, normalizer = file["model"], file.get("normalizer") or {}
    steps = file.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    names, added = set(vocabulary), file.get("added_tokens") or []
    byte_level = (
        model.get("type") == "BPE"
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and normalizer.get("type", "NFC") in {"NFC", "NFD"}
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in _LOSSLESS and step.get("behavior") != "Removed" for step in steps)
        and names.issuperset(ByteLevel.alphabet())
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    )
    return max(map(len, names)) if byte_level else 0


def _with_mark(tokenizer: Tokenizer, tokenizer_json: str, mark: str) -> Tokenizer:
    """Add the mark to the tokenizer under an unused id.

    The library assigns the number of tokens as its id. If ids have gaps, another token may have that id. Then the mark
    is added to the vocabulary after the highest id, together with all added tokens, so that every token keeps its id.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = AddedToken(mark, normalized=False, special=True)
    tokenizer.add_special_tokens([added])
    if tokenizer.token_to_id(mark) in set(vocabulary.values()):
        file = json.loads(tokenizer_json)
        file["model"]["vocab"] = {**vocabulary, mark: max(vocabulary.values()) + 1}
        tokenizer = _read(json.dumps(file))
        tokenizer.add_special_tokens([added])
    return tokenizer


def _lookahead(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the first character of each text, including overlapping occurrences."""
    by_first: dict[str, list[str]] = {}
    for text in sorted(set(texts)):
        by_first.setdefault(text[0], []).append(text[1:])
    branches = [f"{re.escape(first)}(?={_trie(rest)})" for first, rest in by_first.items()]
    return re.compile("|".join(branches)) if branches else None


def _trie(texts: list[str]) -> str:
    """Return a pattern for any of the texts that reads each character once, independent of their number."""
    if "" in texts:
        return ""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _trie(rest) for first, rest in by_first.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _decoder_types(decoder: dict[str, object] | None) -> frozenset[str]:
    """Return the types of a decoder and of its nested decoders."""
    if not decoder:
        return frozenset()
    nested = decoder.get("decoders")
    types = {str(decoder.get("type"))}
    for each in nested if isinstance(nested, list) else []:
        types |= _decoder_types(each)
    return frozenset(types)
