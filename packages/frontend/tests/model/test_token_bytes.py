"""Bytes of tokens add up to the text for every kind of tokenizer."""

import pytest
from tokenizers import Tokenizer, decoders, models

from tercet.frontend.model.token_bytes import TokenBytes, spelling
from tercet.frontend.model.tokenizer import PromptTokenizer

TEXT = "the quick brown fox, €5 – naïve 日本 🎉\n\t~\x00"


def test_byte_level_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    assert b"".join(names[each] for each in tokenizer.encode(TEXT).ids) == TEXT.encode()


def test_every_byte_has_a_byte_level_token(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    assert {names[each] for each in range(tokenizer.get_vocab_size())} >= {bytes([value]) for value in range(256)}


def test_added_tokens_are_their_text(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    [end] = tokenizer.encode("<|im_end|>").ids
    assert names[end] == b"<|im_end|>"
    assert names[10**6] == b""


def test_sentencepiece_and_wordpiece_spell_in_their_own_ways() -> None:
    vocabulary = {"<unk>": 0, "▁hello": 1, "<0xE2>": 2, "ab": 3, "<0xZZ": 4}
    pieces = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = TokenBytes(PromptTokenizer(pieces.to_str()))
    assert [names[each] for each in range(1, 5)] == [b" hello", b"\xe2", b"ab", b"<0xZZ"]
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    names = TokenBytes(PromptTokenizer(words.to_str()))
    assert [names[1], names[2]] == [b" play", b"ing"]


@pytest.mark.parametrize(
    ("data", "text"), [(b"abc", "abc"), ("é".encode(), "é"), (b"\xc3", "bytes:\\xc3"), (b"a\xff", "bytes:\\x61\\xff")]
)
def test_bytes_that_are_no_text_are_spelt_out(data: bytes, text: str) -> None:
    assert spelling(data, "bytes:") == text
