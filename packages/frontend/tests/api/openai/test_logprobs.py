"""Log-probabilities in JSON."""

import math

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tercet.frontend.api.openai.logprobs import (
    STEP_TOKENS,
    CompletionLogprobs,
    chat_logprob_steps,
    chat_logprobs,
    echo_logprobs,
    entries,
    prompt_logprob_steps,
    prompt_logprobs,
    prompt_offsets,
)
from tercet.frontend.http.loop_turns import result_of
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.protocol.messages.values import Logprobs, pack_floats, pack_ints

SCORES = Logprobs(
    pack_floats([math.nan, -math.inf]), 2, pack_ints([1, 2, 3, 4]), pack_floats([-0.5, -math.inf, math.nan, -1.0])
)


def test_what_json_cannot_hold_is_a_floor_or_null() -> None:
    assert list(entries([SCORES])) == [(None, [(1, -0.5), (2, -9999.0)]), (-9999.0, [(4, -1.0)])]


def test_parts_follow_one_another() -> None:
    parts = [Logprobs(pack_floats([-0.25])), Logprobs(pack_floats([-0.5, -1.0]))]
    assert [chosen for chosen, _ in entries(parts)] == [-0.25, -0.5, -1.0]


def test_offsets_count_characters_and_go_on_in_the_next_chunk(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    ids = tokenizer.encode("é€the").ids
    assert len(ids) == 6
    parts = [Logprobs(pack_floats([-1.0])) for _ in ids]
    writer = CompletionLogprobs(names)
    first, second = writer.write(ids[:2], parts[:2]), writer.write(ids[2:], parts[2:])
    assert [*first["text_offset"], *second["text_offset"]] == [0, 0, 1, 1, 1, 2]
    assert first["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert second["tokens"][-1] == "the"


def test_a_token_behind_a_broken_character_begins_behind_it(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    ids = {names[each]: each for each in range(tokenizer.get_vocab_size())}
    pieces = [b"\xe2", b"\x82", b"a", b"\xc3", b"\xe2", b"\x82", b"\xac", b"b", b"\xff", b"c"]
    said = [ids[piece] for piece in pieces]
    parts = [Logprobs(pack_floats([-1.0])) for _ in said]
    text = "\ufffda\ufffd\u20acb\ufffdc"
    offsets = CompletionLogprobs(names).write(said, parts)["text_offset"]
    assert offsets == [0, 0, 1, 2, 3, 3, 3, 4, 5, 6]
    assert [text[offsets[place]] for place in (2, 7, 9)] == ["a", "b", "c"]


def metaspace() -> Tokenizer:
    """Return a tokenizer of words with SentencePiece's leading space, and a token that begins every text."""
    vocabulary = {"<s>": 0, "<unk>": 1, "▁the": 2, "▁quick": 3, "▁é": 4, "▁": 5}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.add_special_tokens(["<s>", "<unk>"])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("the quick é", [0, 0, 3, 9]),
        (" the quick", [0, 0, 4]),
        ("<s>the quick", [0, 3, 3, 6]),
        ("the strange quick", [0, 0, 3, 11]),
        ("", [0]),
    ],
)
def test_offsets_of_a_prompt_are_places_in_its_text(text: str, offsets: list[int]) -> None:
    tokenizer = PromptTokenizer(metaspace().to_str())
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert list(prompt_offsets(TokenBytes(tokenizer), tokenizer.special_ids, ids, text)) == offsets


def test_offsets_go_on_behind_the_prompt_and_pass_over_what_is_hidden() -> None:
    tokenizer = PromptTokenizer(metaspace().to_str())
    names, scores = TokenBytes(tokenizer), Logprobs(pack_floats([-1.0] * 3))
    written = result_of(echo_logprobs(names, tokenizer.special_ids, [0, 2], "the", scores.first(2)))
    echoed = {name: orjson.loads(orjson.dumps(values.fragment())) for name, values in written.items()}
    writer = CompletionLogprobs(names, hidden=tokenizer.special_ids, offset=len("the"))
    first, second = writer.write([3, 0, 2], [scores]), writer.write([3], [scores])
    offsets = [*echoed["text_offset"], *first["text_offset"], *second["text_offset"]]
    assert offsets == [0, 0, 3, 9, 9, 13]


def test_entries_beyond_the_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    parts = [Logprobs(pack_floats([-1.0, -2.0]))]
    assert len(chat_logprobs(names, [40], parts)["content"]) == 1
    assert CompletionLogprobs(names).write([40], parts)["token_logprobs"] == [-1.0]


@pytest.mark.parametrize("lengths", [[1] * 70, [70], [3, 0, 40, 27]], ids=["tokens", "a prompt", "mixed"])
@pytest.mark.parametrize("shown", [70, 69])
def test_written_in_steps_they_are_the_same(tokenizer: Tokenizer, lengths: list[int], shown: int) -> None:
    """Steps have only a few tokens each."""
    names, ids = TokenBytes(PromptTokenizer(tokenizer.to_str())), [40 + place % 9 for place in range(shown)]
    place, parts = 0, []
    for length in lengths:
        chosen = [-float(place + each) for each in range(length)]
        others = pack_ints([41 + each % 5 for each in range(2 * length)])
        parts.append(Logprobs(pack_floats(chosen), 2, others, pack_floats([-0.5 * each for each in range(2 * length)])))
        place += length
    whole = chat_logprobs(names, ids, parts, 1)
    assert orjson.loads(orjson.dumps(result_of(chat_logprob_steps(names, ids, parts, 1)))) == whole
    steps = [1 for _ in chat_logprob_steps(names, ids, parts, 1)]
    assert len(steps) >= 70 / STEP_TOKENS
    if shown == 70 and len(parts) == 1:
        told = result_of(prompt_logprob_steps(names, ids, parts[0], 1))
        assert orjson.loads(orjson.dumps(told)) == prompt_logprobs(names, ids, parts[0], 1)
