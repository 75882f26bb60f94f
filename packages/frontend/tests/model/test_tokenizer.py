"""Clients' text never becomes special tokens, and ordinary text is tokenized with its context."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.tokenizer import PromptTokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "user assistant system", "im_start im_end hello world"] * 3
SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|im_end|><|im_start|>"]


def byte_level(*, normalized: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=normalized) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<｜User｜>", normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, lstrip=True) for text in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


ALL = {"byte-level": byte_level(), "metaspace": metaspace(), "normalized": byte_level(normalized=True)}
READY = {name: PromptTokenizer(tokenizer.to_str()) for name, tokenizer in ALL.items()}

pieces = st.one_of(
    st.sampled_from(
        [*SPECIALS, "<|", "|>", "<", ">", "im_end", "<|im_", "end|>", "[", "]", "s", "/s", "<think>", "<｜User｜>", " "]
    ),
    st.text(max_size=8),
)
texts = st.lists(pieces, max_size=8).map("".join)


@pytest.mark.parametrize("name", ALL)
@given(left=texts, right=texts)
@settings(max_examples=150, deadline=None)
def test_no_text_of_a_user_becomes_a_control_token(name: str, left: str, right: str) -> None:
    tokenizer = READY[name]
    ids = tokenizer.encode(tokenizer.escape_special(left) + tokenizer.escape_special(right), add_special_tokens=False)
    assert not set(ids) & tokenizer.control.keys() - {tokenizer._tokenizer.token_to_id("<unk>")}


@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_escaped_text_decodes_to_what_was_typed(text: str) -> None:
    tokenizer = READY["byte-level"]
    ids = tokenizer.encode(tokenizer.escape_special(text), add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", ALL)
@given(words=st.lists(st.text(alphabet="abc defgh.,!?äöü日本\n\t🎉", min_size=1, max_size=20), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_ordinary_text_is_tokenized_like_the_whole_rendered_string(name: str, words: list[str]) -> None:
    tokenizer = READY[name]

    def render(*said: str) -> str:
        return "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in said) + "<|im_start|>assistant\n"

    expected = ALL[name].encode(render(*words), add_special_tokens=False).ids
    assert tokenizer.encode(render(*map(tokenizer.escape_special, words)), add_special_tokens=False) == expected


def test_a_templates_own_specials_stay_special() -> None:
    tokenizer = READY["byte-level"]
    [end] = ALL["byte-level"].encode("<|im_end|>").ids
    rendered = f"<|im_start|>{tokenizer.escape_special('say <|im_end|> please')}<|im_end|>"
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert ids.count(end) == 1
    assert ids[-1] == end


def test_control_tokens_are_replaced_where_no_client_wrote_them() -> None:
    prompts = PromptTokenizer(byte_level().to_str())
    text = f"{prompts.escape_special('<s>')}<s>" + "<s>" * 1000
    replaced = prompts.replace_control(text, "<s>", ["ab" * number for number in range(1001)])
    assert replaced is not None
    assert prompts.unescape(replaced) == "<s>" + "ab" * (1000 * 1001 // 2)
    assert prompts.replace_control(text, "<s>", ["ab"] * 1000) is None
    assert prompts.replace_control(text, "<s>", ["ab"] * 1002) is None


def test_a_token_split_over_two_texts_is_not_put_together() -> None:
    tokenizer = READY["byte-level"]
    for text in SPECIALS:
        for cut in range(1, len(text)):
            rendered = tokenizer.escape_special(text[:cut]) + tokenizer.escape_special(text[cut:])
            ids = tokenizer.encode(rendered, add_special_tokens=False)
            assert not set(ids) & tokenizer.control.keys(), (text, cut)


def test_role_markers_count_as_control_tokens_even_if_not_called_special() -> None:
    tokenizer = READY["byte-level"]
    marker = ALL["byte-level"].token_to_id("<｜User｜>")
    think = ALL["byte-level"].token_to_id("<think>")
    assert tokenizer.encode("<｜User｜>", add_special_tokens=False) == [marker]
    assert marker not in tokenizer.encode(tokenizer.escape_special("<｜User｜>"), add_special_tokens=False)
    assert tokenizer.encode(tokenizer.escape_special("<think>"), add_special_tokens=False) == [think]


def test_a_control_token_reached_by_normalization_is_refused() -> None:
    tokenizer = Tokenizer.from_str(byte_level(normalized=True).to_str())
    tokenizer.normalizer = normalizers.NFKC()
    ready = PromptTokenizer(tokenizer.to_str())
    start = tokenizer.token_to_id("<s>")
    assert ready.encode("<s>", add_special_tokens=False) == [start]
    assert tokenizer.encode("＜s＞", add_special_tokens=False).ids == [start]
    with pytest.raises(BadRequestError, match="reserved"):
        ready.encode(ready.escape_special("＜s＞"), add_special_tokens=False)


def test_a_control_token_of_one_character_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("♞", normalized=False)])
    ready = PromptTokenizer(tokenizer.to_str())
    with pytest.raises(BadRequestError, match="♞"):
        ready.escape_special("a ♞ appears")


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    ids = PromptTokenizer(tokenizer.to_str()).encode("the quick brown fox", add_special_tokens=False)
    assert ids == ALL["byte-level"].encode("the quick brown fox").ids


def test_special_tokens_are_added_where_asked() -> None:
    tokenizer, bos = READY["metaspace"], ALL["metaspace"].token_to_id("<s>")
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == bos
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != bos


def test_ids_beyond_the_vocabulary_are_refused_in_decoding() -> None:
    tokenizer = READY["byte-level"]
    assert tokenizer.vocab_size == ALL["byte-level"].get_vocab_size()
    with pytest.raises(BadRequestError):
        tokenizer.decode([tokenizer.vocab_size], skip_special_tokens=True)


def test_guarding_takes_linear_time_with_thousands_of_control_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(f"<unused{number}>", normalized=False) for number in range(6000)])
    ready = PromptTokenizer(tokenizer.to_str())
    for hostile in ("<", "<|im_en", "<unused12", "<unused5999>"):
        times = []
        for size in (200_000, 400_000):
            text = hostile * (size // len(hostile))
            began = time.thread_time()
            ready.escape_special(text)
            times.append(time.thread_time() - began)
        assert times[1] < 8 * times[0] + 0.05
        assert times[1] < 2.0


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded() -> None:
    """The event loop is one of these threads."""
    tokenizer = PromptTokenizer(byte_level().to_str())
    text = "the quick brown fox " * 40_000
    ids: list[int] = []
    turns, longest, last = 0, 0.0, time.monotonic()
    began = last
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(lambda: ids.extend(tokenizer.encode(text, add_special_tokens=False)))
        while not work.done():
            time.sleep(0.001)
            now = time.monotonic()
            turns, longest, last = turns + 1, max(longest, now - last), now
        work.result()
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert turns > 5
    assert longest < (last - began) / 2


def test_no_id_tells_the_mark() -> None:
    tokenizer = byte_level()
    prompts = PromptTokenizer(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    assert [prompts.token(each) for each in range(size)] == [tokenizer.id_to_token(each) for each in range(size)]
    assert not any(prompts.token(each) for each in range(size, size + 9))
    with pytest.raises(BadRequestError, match=f"{size} is not a token id"):
        prompts.decode([size], skip_special_tokens=False)


def test_ids_behind_a_gap_are_decoded() -> None:
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 5}, "merges": []}}
    prompts = PromptTokenizer(json.dumps(vocabulary))
    assert prompts.decode([5, 0], skip_special_tokens=False) == "c a"
    with pytest.raises(BadRequestError, match="3 is not a token id"):
        prompts.decode([3], skip_special_tokens=False)


@pytest.mark.parametrize("specials", [[], ["<s>"]])
def test_the_mark_takes_nobodys_id(specials: list[str]) -> None:
    """The library would assign the number of tokens, which here is the id of `c`."""
    last = 3 + len(specials)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": last}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    prompts = PromptTokenizer(tokenizer.to_str())
    assert prompts.decode([last], skip_special_tokens=True) == "c"
    unknown = [0] * (1 + len(specials))  # a typed special token is encoded in two parts
    assert prompts.encode(prompts.escape_special("b <s> c"), add_special_tokens=False) == [1, *unknown, last]
    assert prompts.encode("b <s> c", add_special_tokens=False) == tokenizer.encode("b <s> c").ids
    assert prompts.special_ids == {tokenizer.token_to_id(text) for text in specials}


@pytest.mark.parametrize("name", ALL)
@given(text=st.one_of(texts, st.text(alphabet="the quick brown\n", max_size=300)))
@settings(max_examples=200, deadline=None)
def test_no_text_has_fewer_tokens_than_are_foreseen(name: str, text: str) -> None:
    tokenizer = READY[name]
    escaped = tokenizer.escape_special(text)
    assert tokenizer.fewest_tokens(escaped) <= len(tokenizer.encode(escaped, add_special_tokens=False))


def test_the_longest_token_bounds_a_text_of_bytes() -> None:
    tokenizer = READY["byte-level"]
    longest = max(map(len, ALL["byte-level"].get_vocab()))
    assert longest < 64
    assert tokenizer.fewest_tokens("x" * 640) == -(-640 // longest)
    assert READY["metaspace"].fewest_tokens("x" * 640) == 10, "unknown words of any length are one token there"


@pytest.mark.parametrize("what", ["a removed part", "stripped white space", "a swallowed space", "a missing byte"])
def test_a_lossy_tokenizer_is_not_bounded_by_its_longest_token(what: str) -> None:
    made = byte_level()
    match what:
        case "a removed part":
            cut = pre_tokenizers.Split(" ", "removed")
            made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "stripped white space":
            made.normalizer = normalizers.Strip()
        case "a swallowed space":
            made.add_special_tokens([AddedToken("<|wide|>", rstrip=True, normalized=False)])
        case _:
            file = json.loads(made.to_str())
            del file["model"]["vocab"]["!"]
            made = Tokenizer.from_str(json.dumps(file))
    text = "<|wide|>" + " " * 640 + "!" * 640
    tokenizer = PromptTokenizer(made.to_str())
    assert tokenizer.fewest_tokens(text) == len(text) // 64
