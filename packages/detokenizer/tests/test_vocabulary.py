"""Piece table, compared with the tokenizer it was made from."""

import json
from typing import Any

import pytest

from tercet.detokenizer.decode_status import DecodeStatus, WindowStatus
from tercet.detokenizer.errors import TokenizerError
from tercet.detokenizer.vocabulary import Vocabulary

REPLACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def test_every_piece_is_what_the_tokenizer_adds_after_any_other_token(vocabularies: dict[str, Vocabulary]) -> None:
    for kind, vocabulary in vocabularies.items():
        if vocabulary.joining is None:
            continue
        before = vocabulary.tokenizer.encode("the dog", add_special_tokens=False).ids
        begun = vocabulary.decode(before)
        for token_id in range(vocabulary.tokenizer.get_vocab_size()):
            piece = vocabulary.table(False)[token_id]
            assert piece is not None
            added = vocabulary.decode([*before, token_id])[len(begun) :]
            shown = piece if isinstance(piece, str) else piece.decode(errors=vocabulary.joining.errors)
            assert shown == added, (kind, token_id)


def test_the_table_gives_the_text_of_the_window_and_never_later(vocabularies: dict[str, Vocabulary]) -> None:
    text = "The quick  brown fox,\n你好 😀👩‍👩‍👧‍👦 e\u0301 नमस्ते Съешь ещё"
    for kind, vocabulary in vocabularies.items():
        if vocabulary.joining is None:
            continue
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        table, window = DecodeStatus(vocabulary, True), WindowStatus(vocabulary, True)
        quick = slow = ""
        for token_id in ids:
            quick, slow = quick + table.push(token_id), slow + window.push(token_id)
            assert quick.startswith(slow), kind
        assert quick + table.flush() == slow + window.flush(), kind


def test_special_and_unknown_ids_add_nothing(byte_level: Vocabulary) -> None:
    end = byte_level.tokenizer.token_to_id("</s>")
    assert end is not None
    assert byte_level.table(skip_special_tokens=True)[end] is None
    assert byte_level.table(skip_special_tokens=False)[end] == "</s>"
    size = len(byte_level.table(True))
    assert [byte_level.table(True)[n] for n in (-1, 10**9, -(2**31))] == [None] * 3
    assert len(byte_level.table(True)) == size


@pytest.mark.parametrize(
    ("decoder", "known"),
    [
        ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, True),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP]}, True),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, True),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, True),
        (
            {
                "type": "Sequence",
                "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP | {"start": 2}],
            },
            False,
        ),
        (
            {
                "type": "Sequence",
                "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP | {"stop": 1}],
            },
            False,
        ),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, REPLACE]}, False),
        ({"type": "BPEDecoder", "suffix": "</w>"}, False),
        ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, False),
        (None, False),
    ],
)
def test_only_decoders_whose_rules_are_known_get_a_table(
    llama: Vocabulary, decoder: dict[str, Any] | None, known: bool
) -> None:
    contents = json.loads(llama.tokenizer.to_str()) | {"decoder": decoder}
    assert (Vocabulary(json.dumps(contents)).joining is not None) == known


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"decoder": 3}', '{"version": "1.0", "model": {"type": "None"}}'])
def test_what_is_not_a_tokenizer_is_refused_by_name(text: str) -> None:
    with pytest.raises(TokenizerError, match=r"not a tokenizer\.json"):
        Vocabulary(text)
