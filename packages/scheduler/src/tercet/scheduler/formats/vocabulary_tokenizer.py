"""Tokenizers from vocab.json and merges.txt (BPE of bytes), and from vocab.txt (WordPiece)."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from tercet.protocol.json_files import read_object
from tercet.scheduler.tokenizer_files import token_text

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of words of Qwen2 and Qwen3."""
_LARGEST_ID = (1 << 31) - 1


def gpt2(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of GPT-2 and RoBERTa, without what is put around a text."""
    tokenizer = _bpe(files)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space") is True)
    return tokenizer


def gpt_neox(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of GPT-NeoX."""
    tokenizer = gpt2(files, settings)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def qwen2(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of Qwen2 and Qwen3."""
    tokenizer = _bpe(files)
    prefix = settings.get("add_prefix_space") is True
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    return tokenizer


def bert(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of BERT, without what is put around a text."""
    lines = files["vocab.txt"].decode().removesuffix("\n").split("\n")
    vocabulary = {line.rstrip(): place for place, line in enumerate(lines)}
    unknown = token_text(settings.get("unk_token"))
    if unknown is None or unknown not in vocabulary:
        raise ValueError(f"its unk_token {unknown!r} is not in vocab.txt")
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=unknown))
    strip_accents = settings.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True) is True,
        strip_accents=strip_accents if isinstance(strip_accents, bool) else None,
        lowercase=settings.get("do_lower_case", True) is True,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _bpe(files: Mapping[str, bytes]) -> Tokenizer:
    vocabulary = read_object(files, "vocab.json")
    if not all(type(each) is int and 0 <= each <= _LARGEST_ID for each in vocabulary.values()):
        raise ValueError("vocab.json: must be an object of ids by token")
    lines = files["merges.txt"].decode().split("\n")
    merges = [_merge(line.removesuffix("\r"), place) for place, line in enumerate(lines, 1) if _is_merge(line)]
    tokenizer = Tokenizer(BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _is_merge(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#version")


def _merge(line: str, place: int) -> tuple[str, str]:
    parts = line.split(" ")
    if len(parts) != 2:
        raise ValueError(f"merges.txt: line {place} is not two tokens with a space between them")
    return parts[0], parts[1]
