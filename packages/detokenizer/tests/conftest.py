"""Tiny real tokenizers with every kind of decoder, trained once per run."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tercet.detokenizer.vocabulary import Vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog's friend doesn't mind. It is 3.14 o'clock!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; café, naïve, façade.",
    "你好,世界。我喜欢学习中文和日本語。こんにちは世界、元気ですか。안녕하세요 세계",
    "Привет, мир! Как дела? Съешь ещё этих мягких французских булок.",
    "😀😁😂 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301a\u0300o\u0302 नमस्ते दुनिया สวัสดีชาวโลก",
    "def f(x):\n    return x + 1\n\n\tif x:  # two  spaces   three\n        pass",
] * 8
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("é"), AddedToken("世界")])
    return tokenizer


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    """Return a BPE over ▁ with byte fallback, as converted from SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", *SPECIAL, *bytes_], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    contents = json.loads(tokenizer.to_str())
    contents["added_tokens"] = [token for token in contents["added_tokens"] if token["content"] not in bytes_]
    contents["decoder"] = json.loads(decoder.__getstate__())
    tokenizer = Tokenizer.from_str(json.dumps(contents))
    tokenizer.add_tokens([AddedToken("<tool call>")])
    return tokenizer


def _llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece(decoders.Sequence(steps))


def _gemma() -> Tokenizer:
    return _sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def _metaspace() -> Tokenizer:
    return _sentencepiece(decoders.Metaspace())


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_suffix() -> Tokenizer:
    """Return a BPE with </w>, whose decoder depends on the end of the text, so that it has no piece table."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "metaspace": _metaspace,
    "word_piece": _word_piece,
    "word_suffix": _word_suffix,
}


@functools.cache
def vocabulary_of(kind: str) -> Vocabulary:
    return Vocabulary(MAKERS[kind]().to_str())


@pytest.fixture(params=list(MAKERS))
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    kind: Any = request.param
    return vocabulary_of(kind)


@pytest.fixture
def vocabularies() -> dict[str, Vocabulary]:
    return {kind: vocabulary_of(kind) for kind in MAKERS}


@pytest.fixture
def byte_level() -> Vocabulary:
    return vocabulary_of("byte_level")


@pytest.fixture
def llama() -> Vocabulary:
    return vocabulary_of("llama")
