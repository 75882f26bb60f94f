"""Inputs encode like the tokenizer itself encodes them, except for special tokens in clients' text."""

import random

import pytest

from packages.frontend.tests import encoders
from tercet.frontend.errors import BadRequestError, ContextLengthExceededError
from tercet.frontend.model.embedding_request import (
    EmbeddingRequest,
    EncodedInput,
    Input,
    PairInput,
    TextInput,
    TokenInput,
)
from tercet.frontend.model.input_encoder import InputEncoder
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.protocol.messages.values import ModelIdentity, unpack_ints

TEMPLATES = ["bert", "roberta", "last", "none"]


def served(template: str = "bert", context_length: int = 16, **files: object) -> ServedModel:
    made = ModelFiles(encoders.files(template, **files))
    return ServedModel("encoder", made, encoders.limits(context_length=context_length), ModelIdentity(weights="w"))


def encode(model: ServedModel, *inputs: Input, **options: object) -> list[EncodedInput]:
    params = [f"input[{place}]" for place in range(len(inputs))]
    request = EmbeddingRequest(model="encoder", inputs=list(inputs), params=params, **options)  # type: ignore[arg-type]
    return InputEncoder(request, model).encode(range(len(inputs)))


def ids(encoded: EncodedInput) -> list[int]:
    return list(unpack_ints(encoded.ids))


def types(encoded: EncodedInput) -> list[int]:
    return list(unpack_ints(encoded.types)) or [0] * (len(encoded.ids) // 4)


@pytest.mark.parametrize("template", TEMPLATES)
def test_texts_and_pairs_are_what_the_tokenizer_makes_of_them(template: str) -> None:
    model, reference = served(template), encoders.tokenizer(template)
    for first, second in [("The cat sat on the mat", "rain"), ("dogs", "a Dog fell on the rain"), ("strange", "cats")]:
        [single, pair] = encode(model, TextInput(first), PairInput(first, second, "query"))
        wanted = reference.encode(first)
        assert (ids(single), types(single)) == (wanted.ids, wanted.type_ids)
        wanted = reference.encode(first, second)
        assert (ids(pair), types(pair)) == (wanted.ids, wanted.type_ids)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("limit", range(5, 15))
def test_what_is_cut_is_what_the_tokenizer_cuts(template: str, limit: int) -> None:
    model, reference = served(template), encoders.tokenizer(template)
    reference.enable_truncation(limit)
    chance = random.Random(limit)
    for _ in range(20):
        first, second = (" ".join(chance.choices(["cat", "dog", "rain"], k=chance.randrange(1, 14))) for _ in range(2))
        [single, pair] = encode(model, TextInput(first), PairInput(first, second, "query"), truncate=limit)
        assert ids(single) == reference.encode(first).ids
        wanted = reference.encode(first, second)
        assert (ids(pair), types(pair)) == (wanted.ids, wanted.type_ids)


def test_a_typed_special_token_is_text() -> None:
    [encoded, plain, pair] = encode(
        served(), TextInput("the [SEP] cat"), TextInput("the cat"), PairInput("cat [SEP] dog", "rain", "query")
    )
    special = 3
    assert ids(plain).count(special) == ids(encoded).count(special) == 1
    assert ids(pair).count(special) == 2
    words = [*["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], *encoders.WORDS]
    assert [words[token] for token in ids(encoded)] == ["[CLS]", "the", "[", "sep", "]", "cat", "[SEP]"]


def test_token_ids_are_taken_as_they_are() -> None:
    [encoded] = encode(served(), TokenInput([7, 8, 9]))
    assert (ids(encoded), encoded.types) == ([7, 8, 9], b"")
    [cut] = encode(served(), TokenInput([7, 8, 9]), truncate=2)
    assert ids(cut) == [7, 8]


def test_truncation_by_minus_one_cuts_to_what_the_model_reads() -> None:
    [encoded] = encode(served(), TextInput("cat " * 40), truncate=-1)
    assert len(ids(encoded)) == 16
    assert (ids(encoded)[0], ids(encoded)[-1]) == (2, 3)


@pytest.mark.parametrize("wrong", [TextInput("cat " * 15), TextInput("cat " * 4000), TokenInput([5] * 17)])
def test_what_is_too_long_is_refused_by_name(wrong: Input) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        encode(served(), TextInput("cat"), wrong)
    assert caught.value.param == "input[1]"


@pytest.mark.parametrize(
    ("first", "second", "param"),
    [
        ("cat " * 14, "dog", "query"),
        ("cat " * 4000, "dog", "query"),
        ("cat " * 13, "dog", "input[0]"),
        ("cat", "dog " * 4000, "input[0]"),
    ],
)
def test_a_pair_that_is_too_long_is_refused_by_the_text_that_does_not_fit(first: str, second: str, param: str) -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        encode(served(), PairInput(first, second, "query"))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("wrong", "options", "param"),
    [
        (TokenInput([20]), {}, "input[0]"),
        (TextInput("cat"), {"truncate": 17}, "truncate_prompt_tokens"),
        (TextInput("cat"), {"truncate": 2}, "truncate_prompt_tokens"),
        (PairInput("cat", "dog", "query"), {"truncate": 3}, "truncate_prompt_tokens"),
        (TextInput("cat"), {"prompt_name": "nobody's"}, "prompt_name"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_name(wrong: Input, options: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        encode(served(), wrong, **options)
    assert caught.value.param == param


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequestError, match="no tokens"):
        encode(served("none"), TextInput(" "))


def test_prompts_stand_before_a_text() -> None:
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    model = served(config_sentence_transformers=prompts)
    reference = encoders.tokenizer()
    [named] = encode(model, TextInput("the cat"), prompt_name="query")
    assert ids(named) == reference.encode("query: the cat").ids
    [plain, pair] = encode(model, TextInput("the cat"), PairInput("cat", "dog", "query"))
    assert ids(plain) == reference.encode("the cat").ids
    model = served(config_sentence_transformers={**prompts, "default_prompt_name": "query"})
    assert encode(model, TextInput("the cat"), PairInput("cat", "dog", "query")) == [named, pair]


def test_texts_are_put_into_lower_case_where_sentence_transformers_does() -> None:
    model = served(sentence_bert_config={"do_lower_case": True})
    model.tokenizer._tokenizer.normalizer = None
    [encoded] = encode(model, TextInput("The CAT"))
    assert ids(encoded) == encoders.tokenizer().encode("the cat").ids


def test_prompts_are_put_into_lower_case_too_but_for_special_tokens() -> None:
    settings = {"prompts": {"q": "The [SEP]DOG "}, "default_prompt_name": "q"}
    model = served(sentence_bert_config={"do_lower_case": True}, config_sentence_transformers=settings)
    model.tokenizer._tokenizer.normalizer = None
    [encoded] = encode(model, TextInput("The CAT"))
    assert ids(encoded) == encoders.tokenizer().encode("the [SEP]dog the cat").ids
