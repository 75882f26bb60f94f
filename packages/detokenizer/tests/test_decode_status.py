"""Incremental text equals the text at once, for every kind of tokenizer and any ids."""

import json
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from packages.protocol.tests.extents import extents
from tercet.detokenizer.decode_status import DecodeStatus, WindowStatus, text_stream
from tercet.detokenizer.vocabulary import Vocabulary

TEXTS = [
    "Hello, the quick brown fox. It's  3.14\n\n\tand   then",
    "你好,世界 こんにちは 안녕",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 done",
    "e\u0301 a\u0300 o\u0302 नमस्ते สวัสดี",
    "\U0001f9d1\U0001f3fd‍\U0001f680 \u200b\ufffd \ufeff x",
    " leading, and trailing ",
]
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def id_of(vocabulary: Vocabulary, token: str) -> int:
    token_id = vocabulary.tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def stream(vocabulary: Vocabulary, ids: list[int], tail: list[int], skip: bool = True) -> list[str]:
    status = text_stream(vocabulary, skip, tail)
    return [*(status.push(token_id) for token_id in ids), status.flush()]


def whole(vocabulary: Vocabulary, ids: list[int], tail: list[int], skip: bool = True) -> str:
    """Return the text that tokenizers' own decode adds to the prompt's text."""
    decode = vocabulary.tokenizer.decode
    text, prompt = decode(tail + ids, skip_special_tokens=skip), decode(tail, skip_special_tokens=skip)
    common = next((n for n, pair in enumerate(zip(text, prompt, strict=False)) if pair[0] != pair[1]), len(prompt))
    return text[common:]


def mixes_bytes(vocabulary: Vocabulary, ids: list[int], skip: bool = True) -> bool:
    """Return whether a run of byte tokens has complete characters and invalid bytes, which tokenizers drop."""
    tokens = [vocabulary.token(token_id, skip) for token_id in ids]
    parts = re.findall(
        r"(?:<0x..>)+", " ".join(token for token in tokens if token is not None).replace("> <0x", "><0x")
    )
    for part in parts:
        text = bytes.fromhex(re.sub("<0x|>", "", part)).decode(errors="replace")
        if "\ufffd" in text and text.strip("\ufffd"):
            return True
    return False


def test_every_text_comes_out_as_it_would_at_once(vocabulary: Vocabulary) -> None:
    for text in TEXTS:
        ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        for cut in {0, 1, len(ids) // 2}:
            if not mixes_bytes(vocabulary, ids[:cut]):
                assert "".join(stream(vocabulary, ids[cut:], ids[:cut])) == whole(vocabulary, ids[cut:], ids[:cut])


@extents(50, 500)
def test_any_ids_come_out_as_they_would_at_once(vocabulary: Vocabulary, extent: settings) -> None:
    size = vocabulary.tokenizer.get_vocab_size()
    some = st.integers(0, size - 1) | st.sampled_from([size, size + 7, 2**31 - 1]) | st.sampled_from(range(270))

    @extent
    @given(tail=st.lists(some, max_size=4), ids=st.lists(some, max_size=12), skip=st.booleans())
    def check(tail: list[int], ids: list[int], skip: bool) -> None:
        assume(not mixes_bytes(vocabulary, tail + ids, skip) and not mixes_bytes(vocabulary, tail, skip))
        assert "".join(stream(vocabulary, ids, tail, skip)) == whole(vocabulary, ids, tail, skip)

    check()


@relaxed
@given(text=st.text(max_size=20), cut=st.integers(0, 20))
@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_any_text_survives_and_no_character_is_ever_broken(
    kind: str, text: str, cut: int, request: pytest.FixtureRequest
) -> None:
    vocabulary: Vocabulary = request.getfixturevalue(kind)
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assume(not mixes_bytes(vocabulary, ids[:cut]))
    parts = stream(vocabulary, ids[cut:], ids[:cut])
    assert "".join(parts) == whole(vocabulary, ids[cut:], ids[:cut])
    if "\ufffd" not in vocabulary.tokenizer.decode(ids) and not cut:
        assert not any("\ufffd" in part for part in parts)


def test_a_character_comes_with_its_last_byte_and_not_before(llama: Vocabulary) -> None:
    ids = [id_of(llama, f"<0x{byte:02X}>") for byte in "😀好".encode()]
    assert stream(llama, ids, []) == ["", "", "", "😀", "", "", "好", ""]


def test_a_byte_that_cannot_become_a_character_comes_out_at_once(llama: Vocabulary, byte_level: Vocabulary) -> None:
    ids = [id_of(llama, f"<0x{byte:02X}>") for byte in (0xFF, 0xE4, 0xBD, 0x41, 0xF0, 0x9F)]
    assert stream(llama, ids, []) == ["\ufffd", "", "", "\ufffd\ufffdA", "", "", "\ufffd\ufffd"]
    alphabet = {byte: id_of(byte_level, char) for byte, char in ((0xFF, "ÿ"), (0xE4, "ä"), (0xBD, "½"))}
    ids = [alphabet[0xFF], alphabet[0xE4], alphabet[0xBD], id_of(byte_level, "A"), alphabet[0xE4]]
    assert stream(byte_level, ids, []) == ["\ufffd", "", "", "\ufffdA", "", "\ufffd"]


def test_whole_characters_of_a_byte_run_survive_a_broken_byte(llama: Vocabulary) -> None:
    ids = [id_of(llama, f"<0x{byte:02X}>") for byte in "你".encode() + b"\xff"]
    assert stream(llama, ids, []) == ["", "", "你", "\ufffd", ""]


@relaxed
@given(runs=st.lists(st.binary(min_size=1, max_size=6) | st.text(min_size=1, max_size=2).map(str.encode), max_size=4))
def test_whole_characters_survive_and_other_bytes_are_replaced(llama: Vocabulary, runs: list[bytes]) -> None:
    data = b"a" + b"".join(runs)
    ids = [id_of(llama, f"<0x{byte:02X}>") for byte in data]
    expected, rest = "", data
    while rest:  # SentencePiece's rule, spelled out
        size = next((n for n in (1, 2, 3, 4) if is_character(rest[:n])), 0)
        expected, rest = expected + (rest[:size].decode() or "\ufffd"), rest[size or 1 :]
    assert "".join(stream(llama, ids, [])) == expected


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_the_prompt_decides_about_the_leading_space(llama: Vocabulary) -> None:
    ids = llama.tokenizer.encode("the dog", add_special_tokens=False).ids
    special = id_of(llama, "<s>")
    assert "".join(stream(llama, ids, [])) == "the dog"
    assert "".join(stream(llama, ids, [special])) == "the dog"
    assert "".join(stream(llama, ids, ids)) == " the dog"


def test_special_tokens_show_only_when_asked_for(vocabulary: Vocabulary) -> None:
    end = id_of(vocabulary, "</s>")
    ids = [*vocabulary.tokenizer.encode("the dog", add_special_tokens=False).ids, end]
    assert "</s>" not in "".join(stream(vocabulary, ids, [], skip=True))
    assert "</s>" in "".join(stream(vocabulary, ids, [], skip=False))


def test_a_character_begun_by_the_prompt_is_finished_by_the_output(byte_level: Vocabulary) -> None:
    first, second, third = (id_of(byte_level, char) for char in "ä½ł")  # E4 BD A0
    assert "".join(stream(byte_level, [third], [first, second])) == "你"
    assert "".join(stream(byte_level, [id_of(byte_level, "A")], [first, second])) == "A"
    assert "".join(stream(byte_level, [], [first, second])) == ""


def test_only_a_decoder_that_looks_at_neighbours_goes_without_a_table(vocabularies: dict[str, Vocabulary]) -> None:
    kinds = {kind: type(text_stream(vocabulary, True, [])) for kind, vocabulary in vocabularies.items()}
    assert kinds == dict.fromkeys(kinds, DecodeStatus) | {"word_suffix": WindowStatus}


def test_ids_without_text_do_not_break_the_character_behind_them(llama: Vocabulary) -> None:
    contents = json.loads(llama.tokenizer.to_str())
    contents["decoder"]["decoders"][-1]["start"] = 2  # two spaces: no table has that
    vocabulary = Vocabulary(json.dumps(contents))
    spaces = [id_of(vocabulary, "▁")] * 2
    smile = [id_of(vocabulary, f"<0x{byte:02X}>") for byte in "\U0001f642".encode()]
    whole_at_last = [""] * 3 + ["\U0001f642"]
    assert stream(vocabulary, [*spaces, *smile, *smile], []) == ["", "", *whole_at_last, *whole_at_last, ""]
