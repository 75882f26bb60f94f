"""Pre-tokenizers of byte-level BPE, by the names that `tokenizer.ggml.pre` has for them.

The expressions are those of the models' tokenizer.json files.
"""

from typing import Any

from tercet.scheduler.formats.vocabulary_tokenizer import QWEN2_WORDS

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT2 = ("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "trillion")
_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
_SPLITS = {
    **dict.fromkeys((*_LLAMA3, "smaug-bpe", "dbrx", "chatglm-bpe", "seed-coder"), (_CL100K,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo"), (QWEN2_WORDS,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    "tekken": (_TEKKEN,),
    "deepseek-v3": _DEEPSEEK3,
}


def pre_tokenizer(name: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the normalizer and the pre-tokenizer of tokenizer.json. Raise KeyError for a name that is not known."""
    if name in _GPT2:
        return None, _byte_level(use_regex=True)
    if name in _DIGITS:
        digits = {"type": "Digits", "individual_digits": True}
        return None, {"type": "Sequence", "pretokenizers": [digits, _byte_level(use_regex=True)]}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _SPLITS[name]
    ]
    normalizer = {"type": "NFC"} if name in ("qwen2", "deepseek-r1-qwen") else None
    return normalizer, {"type": "Sequence", "pretokenizers": [*splits, _byte_level(use_regex=False)]}


def ignores_merges(name: str) -> bool:
    """Return whether a whole word that is a token is never split."""
    return name in (*_LLAMA3, "tekken")


def begins_with_bos(name: str) -> bool:
    """Return whether texts begin with the token for that if the file does not say so."""
    return name in (*_LLAMA3, "tekken")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
