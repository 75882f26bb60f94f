"""Tokenizers made of older files are equal to those of transformers, and of SentencePiece."""

import base64
import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tercet.protocol.damage import damaged
from tercet.scheduler.formats.sentencepiece_model import read_sentencepiece
from tercet.scheduler.formats.slow_tokenizers import convert
from tercet.scheduler.grammar.backends import grammar_backend
from tercet.scheduler.model_files import ModelError, check_tokenizer, tokenizer_files
from tercet.scheduler.tokenizer_files import tokenizer_end_ids

GOLDENS = json.loads(Path(__file__).with_name("sentencepiece_goldens.json").read_text())
MODELS = {name: base64.b64decode(content) for name, content in GOLDENS["models"].items()}
CORPUS = [
    "The scheduler admits 1234 requests.",
    "naïve Größe, don't they'll",
    "日本語 привет 😀",
    "a  b\n\n c\t\td",
] * 3
TEXTS = [
    *(
        "",
        " ",
        "Hello world",
        " two  spaces ",
        "a\nb\n\nc\t d",
        "Größe naïve café",
        "日本語 привет",
        "😀 don't they'LL",
    ),
    *(
        "request 12345",
        "<s>hi</s>",
        "a <mask> b",
        "<|endoftext|>x",
        "[CLS] a [MASK]b",
        "<|im_end|> <new>x",
        "e\u0301 é",
    ),
]


def made_of(files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(convert(files)["tokenizer.json"].decode())


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: f"{case['model']}-{case['config']}")
def test_a_sentencepiece_model_equals_transformers(case: dict[str, Any]) -> None:
    files = {
        case["file"]: MODELS[case["model"]],
        "tokenizer_config.json": json.dumps(case["config"]).encode(),
        "config.json": json.dumps({"model_type": case["family"]}).encode(),
    }
    ours = made_of(files)
    for each in case["expected"]:
        assert ours.encode(each["text"]).ids == each["ids"], each["text"]
        assert ours.encode(each["text"], add_special_tokens=False).ids == each["plain"], each["text"]
        assert ours.decode(each["ids"], skip_special_tokens=False) == each["decoded"], each["text"]


@pytest.mark.parametrize("case", GOLDENS["sentencepiece"], ids=lambda case: case["model"])
def test_a_model_of_no_class_equals_sentencepiece(case: dict[str, Any]) -> None:
    ours = made_of({"tokenizer.model": MODELS[case["model"]], "tokenizer_config.json": b'{"tokenizer_class": "Own"}'})
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        assert ours.encode(text).ids == ids, text


def test_a_model_of_no_class_names_its_tokens() -> None:
    made = convert({"tokenizer.model": MODELS["unigram"]})
    named = json.loads(made["tokenizer_config.json"])
    assert named == {"bos_token": "<bos>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer_end_ids(made) == [2]


def trained_bpe() -> dict[str, bytes]:
    """Return a vocab.json and a merges.txt with the tokens that the classes name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>", "<|padding|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=360, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"]), ""]
    return {"vocab.json": json.dumps(model["vocab"]).encode(), "merges.txt": "\n".join(lines).encode()}


def trained_words() -> dict[str, bytes]:
    """Return a vocab.txt."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        [*CORPUS, *(each.lower() for each in CORPUS)], trainers.WordPieceTrainer(vocab_size=180, special_tokens=special)
    )
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {"vocab.txt": "".join(f"{word}\n" for word, _ in words).encode()}


BPE, WORDS = trained_bpe(), trained_words()
MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False, "special": True}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "GPT2Tokenizer": [{}, {"add_prefix_space": True}, {"add_bos_token": True}, {"eos_token": "<|im_end|>"}],
    "GPTNeoXTokenizer": [{}, {"add_bos_token": True, "add_eos_token": True}],
    "Qwen2Tokenizer": [
        {},
        {"add_prefix_space": True, "pad_token": None},
        {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {
                "400": {"content": "<|im_end|>", "special": True, "normalized": False},
                "401": {"content": "<new>", "lstrip": True, "normalized": False},
            },
        },
    ],
    "RobertaTokenizer": [{}, {"add_prefix_space": True, "mask_token": MASK}],
    "BertTokenizer": [
        {},
        {"do_lower_case": False},
        {"tokenize_chinese_chars": False, "strip_accents": False},
        {"additional_special_tokens": ["<new>"]},
    ],
}
OTHERS: list[dict[str, Any]] = [
    {},
    {"special_tokens_map.json": {"unk_token": {"content": "<s>", "lstrip": False}}},
    {"added_tokens.json": {"<new>": 361, "<|im_end|>": 360}},
]
GRID = [(name, config) for name, configs in CONFIGS.items() for config in configs]


@pytest.mark.parametrize(("name", "config"), GRID, ids=str)
def test_a_vocabulary_equals_transformers(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    for number, (others, family) in enumerate(itertools.product(OTHERS, ("", "qwen3"))):
        if name == "BertTokenizer" and "special_tokens_map.json" in others:
            continue  # its unknown token would not be in vocab.txt
        files = {
            **(WORDS if name == "BertTokenizer" else BPE),
            "tokenizer_config.json": json.dumps({"tokenizer_class": name, **config}).encode(),
            **{file: json.dumps(content).encode() for file, content in others.items()},
            **({"config.json": json.dumps({"model_type": family}).encode()} if family else {}),
        }
        directory = tmp_path / str(number)
        directory.mkdir()
        for file, content in files.items():
            (directory / file).write_bytes(content)
        expected = AutoTokenizer.from_pretrained(str(directory))
        made = tokenizer_files(directory)
        ours = Tokenizer.from_str(made["tokenizer.json"].decode())
        for text in TEXTS:
            ids = expected(text)["input_ids"]
            assert ours.encode(text).ids == ids, (others, text)
            plain = expected(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text, add_special_tokens=False).ids == plain, (others, text)
            assert ours.decode(ids) == expected.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        assert tokenizer_end_ids(made) == ([] if expected.eos_token is None else [expected.eos_token_id])


def test_a_family_names_the_class_if_the_tokenizer_does_not() -> None:
    text = "request 12345"
    for family, name in (("qwen3", "Qwen2Tokenizer"), ("roberta", "RobertaTokenizer"), ("gpt2", "GPT2Tokenizer")):
        found = made_of({**BPE, "config.json": json.dumps({"model_type": family}).encode()}).encode(text).ids
        named = made_of({**BPE, "tokenizer_config.json": json.dumps({"tokenizer_class": name}).encode()})
        assert found == named.encode(text).ids


def test_a_model_is_served_with_them(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, and none of vocab\.json"):
        check_tokenizer(directory)
    assert grammar_backend("llguidance", directory, 700, [2]) is None
    (directory / "tokenizer.model").write_bytes(MODELS["llama"])
    check_tokenizer(directory)
    assert json.loads(tokenizer_files(directory)["tokenizer.json"])["model"]["type"] == "BPE"
    assert grammar_backend("llguidance", directory, 700, [2]) is not None
    (directory / "tokenizer.model").write_bytes(MODELS["llama"][:-9])
    with pytest.raises(ModelError, match=r"tokenizer\.model cannot be read as that of a"):
        check_tokenizer(directory)


def varint(value: int) -> bytes:
    return bytes([*([value & 0x7F | 0x80] if value > 0x7F else []), *(varint(value >> 7) if value > 0x7F else [value])])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


PIECE = field(1, field(1, b"a") + b"\x15\0\0\0\0")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "has no pieces"),
        (b"\x0a\xff\xff\xff\xff\x0f", "is longer than the file"),
        (b"\x0a" + b"\xff" * 20, "has no end"),
        (b"\x0b", "wire type 3"),
        (field(1, b""), "piece 0 has no text"),
        (field(1, field(1, b"a") + b"\x15\0\0\xc0\x7f"), "piece 0 has no text, no score"),
        (field(1, field(1, b"a") + b"\x18\x09"), "unknown type"),
        (field(1, field(1, b"\xff")), "utf-8"),
        (PIECE + field(2, b"\x18\x04"), "algorithm is number 4"),
        (PIECE + field(2, b"\xc0\x02\x05"), "unknown token is not one of its pieces"),
        (PIECE + field(2, b"\xc0\x01\x01"), "treat_whitespace_as_suffix"),
        (PIECE + field(3, b"\x28\x00"), "escape_whitespaces is off"),
        (PIECE + field(3, field(2, b"\xff\xff\xff\xff12345")), "cannot be read"),
        (field(1, field(1, b"a" * 30_000)) + field(2, b"\x18\x02"), "pieces are too long"),
    ],
)
def test_what_is_no_sentencepiece_model(content: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.model cannot be read as that of a") as caught:
        convert({"tokenizer.model": content})
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"vocab.json": b'{"a": -1}'}, "must be an object of ids by token"),
        ({"vocab.json": b'{"a": 4294967296}'}, "must be an object of ids by token"),
        ({"vocab.json": b"[]"}, "holds no JSON object"),
        ({"merges.txt": b"a b c"}, "line 1 is not two tokens"),
        ({"merges.txt": b"a qqq"}, "cannot be read"),
        ({"merges.txt": b"\xff"}, "cannot be read"),
        ({"added_tokens.json": b'{"a": "b"}'}, "must be an object of ids by token"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "WhisperTokenizer"}'}, "'WhisperTokenizer' is not read from"),
        ({"tokenizer_config.json": b'{"tokenizer_class": "RobertaTokenizer", "sep_token": null}'}, "needs a sep_token"),
    ],
)
def test_vocabularies_that_cannot_be_read(files: dict[str, bytes], fault: str) -> None:
    with pytest.raises(ValueError, match=r"\.(json|txt)|tokenizer_class") as caught:
        convert({**BPE, **files})
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_that_cannot_be_read() -> None:
    for content in (b"", b"a\nb\n", b"\xff"):
        with pytest.raises(ValueError, match=r"vocab\.txt"):
            convert({"vocab.txt": content})


@pytest.mark.parametrize("name", [*MODELS, "bpe", "words"])
def test_damaged_files_are_read_or_refused_in_one_line(name: str) -> None:
    classes = ["LlamaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", "", "RobertaTokenizer"]
    refusals = []
    for seed in range(60):
        rng = random.Random(f"{name} {seed}")
        files = dict({"bpe": BPE, "words": WORDS}.get(name) or {"tokenizer.model": MODELS[name]})
        file = rng.choice([*files])
        files[file] = damaged(files[file], rng)
        files["tokenizer_config.json"] = json.dumps({"tokenizer_class": rng.choice(classes)}).encode()
        try:
            Tokenizer.from_str(convert(files)["tokenizer.json"].decode()).encode("a damaged file")
        except ValueError as error:
            refusals.append(str(error))
    assert refusals
    assert all(each.isprintable() for each in refusals)


def test_defaults_of_a_file_that_says_nothing() -> None:
    model = read_sentencepiece(PIECE)
    assert (model.unk_id, model.bos_id, model.eos_id, model.pad_id) == (0, 1, 2, -1)
    assert (model.add_dummy_prefix, model.remove_extra_whitespaces, model.byte_fallback) == (True, True, False)
    assert model.piece(-1) is None
    assert model.piece(0) == "a"
