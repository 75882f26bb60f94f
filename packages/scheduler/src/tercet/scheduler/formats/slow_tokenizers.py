"""Conversion of the older files of tokenizers to a tokenizer.json: BPE, WordPiece and SentencePiece models.

Classes and their defaults are those of transformers 5, except that a SentencePiece model is normalized as its own file
says, as SentencePiece does.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, processors

from tercet.protocol.json_files import error_line, read_object
from tercet.scheduler.formats.sentencepiece_tokenizer import (
    SENTENCEPIECE_FILES,
    camembert,
    named_pieces,
    sentencepiece_tokenizer,
    t5,
    xlm_roberta,
)
from tercet.scheduler.formats.vocabulary_tokenizer import bert, gpt2, gpt_neox, qwen2
from tercet.scheduler.tokenizer_files import missing_tokens, token_text

_VOCABULARY = "vocab.json", "merges.txt"
_WORDS = "vocab.txt"
SLOW_FILES = *_VOCABULARY, *SENTENCEPIECE_FILES, _WORDS, "added_tokens.json"
"""Files that a tokenizer is made of if there is no tokenizer.json."""
_ALL_FILES = *SLOW_FILES, "tokenizer_config.json", "special_tokens_map.json", "config.json"

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Class:
    """Class of tokenizers: the function that makes one, its default tokens, and the end of its making."""

    build: Callable[[Mapping[str, bytes], Settings], Tokenizer]
    defaults: Mapping[str, Any]
    processor: Callable[[Tokenizer, Settings], Any]
    """Returns the processor that puts tokens around a text."""


def convert(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a tokenizer.json made of other files, and the tokenizer_config.json with its class's defaults.

    Empty if there are no such files. Raises ValueError for files that cannot be read or are of an unsupported class.
    """
    return _convert(tuple((name, files[name]) for name in _ALL_FILES if name in files))


@lru_cache(maxsize=2)  # several callers convert the same files
def _convert(items: tuple[tuple[str, bytes], ...]) -> dict[str, bytes]:
    files = dict(items)
    config = read_object(files, "tokenizer_config.json")
    main = _main_file(files)
    if main is None:
        return {}
    name = _class_of(main, config, read_object(files, "config.json"))
    made = _CLASSES[name]
    try:
        defaults = named_pieces(files) if name == _ANY_SENTENCEPIECE else made.defaults
        settings = {**defaults, **_settings(files, config, defaults)}
        tokenizer = made.build(files, settings)
        present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_tokens(missing_tokens(present, settings))
        tokenizer.post_processor = made.processor(tokenizer, settings)
        text = tokenizer.to_str().encode()
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and a Rust panic is a BaseException
        raise ValueError(f"{main} cannot be read as that of a {name}: {error_line(error)}") from error
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(settings).encode()}


def _main_file(files: Mapping[str, bytes]) -> str | None:
    """Return the file that has the vocabulary; None without one."""
    if all(name in files for name in _VOCABULARY):
        return _VOCABULARY[0]
    return next((name for name in (*SENTENCEPIECE_FILES, _WORDS) if name in files), None)


def _class_of(main: str, config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Return the name of the class in `_CLASSES` that reads the file. Raises ValueError for an unsupported one."""
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    named = _ALIASES.get(named, named)
    able = _READERS["SentencePiece" if main in SENTENCEPIECE_FILES else main]
    if named in able:
        return named
    by_type = _BY_TYPE.get(str(model.get("model_type")), "")
    if by_type in able:
        return by_type
    if main in SENTENCEPIECE_FILES:
        return _ANY_SENTENCEPIECE
    if named in _GENERIC:
        return able[0]
    raise ValueError(
        f"tokenizer_class {named[:100]!r} is not read from {main}, only {', '.join(able)}: make a tokenizer.json"
    )


def _settings(files: Mapping[str, bytes], config: Settings, defaults: Mapping[str, Any]) -> Settings:
    """Return tokenizer_config.json with the tokens of special_tokens_map.json and added_tokens.json, if they count."""
    if "added_tokens_decoder" in config:
        return config
    config = {**config, **read_object(files, "special_tokens_map.json")}
    added = read_object(files, "added_tokens.json")
    if not added:
        return config
    if not all(isinstance(each, int) and each >= 0 for each in added.values()):
        raise ValueError("added_tokens.json: must be an object of ids by token")
    special = {token_text(value) for name, value in {**defaults, **config}.items() if name.endswith("_token")}
    special |= {token_text(each) for each in config.get("additional_special_tokens") or []}
    table = {
        str(number): {"content": content, "normalized": content not in special, "special": content in special}
        for content, number in added.items()
    }
    return {**config, "added_tokens_decoder": table}


def _required(tokenizer: Tokenizer, settings: Settings, name: str) -> tuple[str, int]:
    """Return the text and id of a named token. Raises ValueError without one."""
    text = token_text(settings.get(name))
    number = None if text is None else tokenizer.token_to_id(text)
    if text is None or number is None:
        raise ValueError(f"it needs a {name}")
    return text, number


def _optional(tokenizer: Tokenizer, settings: Settings) -> Any:
    """Return a processor for the tokens that `add_bos_token` and `add_eos_token` ask for."""
    names = [name for name in ("bos_token", "eos_token") if settings.get(f"add_{name}") is True and settings.get(name)]
    tokens = {name: _required(tokenizer, settings, name) for name in names}
    before = [tokens["bos_token"][0]] if "bos_token" in tokens else []
    after = [tokens["eos_token"][0]] if "eos_token" in tokens else []
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{each}:1" for each in before), "$B:1", *(f"{each}:1" for each in after)],
        special_tokens=list(tokens.values()),
    )


def _end(tokenizer: Tokenizer, settings: Settings) -> Any:
    end = _required(tokenizer, settings, "eos_token")
    return processors.TemplateProcessing(single=["$A", end[0]], pair=["$A", end[0], "$B", end[0]], special_tokens=[end])


def _both_ends(tokenizer: Tokenizer, settings: Settings) -> Any:
    bos, eos = (_required(tokenizer, settings, name) for name in ("bos_token", "eos_token"))
    return processors.TemplateProcessing(
        single=[bos[0], "$A", eos[0]],
        pair=[bos[0], "$A", eos[0], eos[0], "$B", eos[0]],
        special_tokens=[bos, eos],
    )


def _segments(tokenizer: Tokenizer, settings: Settings) -> Any:
    cls, sep = (_required(tokenizer, settings, name) for name in ("cls_token", "sep_token"))
    return processors.TemplateProcessing(
        single=[cls[0], "$A", sep[0]],
        pair=[cls[0], "$A", sep[0], "$B:1", f"{sep[0]}:1"],
        special_tokens=[cls, sep],
    )


def _roberta(tokenizer: Tokenizer, settings: Settings) -> Any:
    cls, sep = (_required(tokenizer, settings, name) for name in ("cls_token", "sep_token"))
    return processors.RobertaProcessing(
        sep, cls, bool(settings.get("trim_offsets", True)), bool(settings.get("add_prefix_space", False))
    )


_END_OF_TEXT = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GEMMA = {
    "unk_token": "<unk>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
_QWEN2 = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
_ANY_SENTENCEPIECE = "SentencePiece model"
_CLASSES = {
    "GPT2Tokenizer": _Class(gpt2, _END_OF_TEXT, _optional),
    "GPTNeoXTokenizer": _Class(gpt_neox, {**_END_OF_TEXT, "pad_token": "<|padding|>"}, _optional),
    "Qwen2Tokenizer": _Class(qwen2, _QWEN2, _optional),
    "RobertaTokenizer": _Class(gpt2, _ROBERTA, _roberta),
    "BertTokenizer": _Class(bert, _BERT, _segments),
    "LlamaTokenizer": _Class(sentencepiece_tokenizer, _LLAMA, _optional),
    "GemmaTokenizer": _Class(sentencepiece_tokenizer, _GEMMA, _optional),
    "T5Tokenizer": _Class(
        t5, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 100}, _end
    ),
    "XLMRobertaTokenizer": _Class(xlm_roberta, _ROBERTA, _both_ends),
    "CamembertTokenizer": _Class(
        camembert, {**_ROBERTA, "mask_token": {"content": "<mask>", "lstrip": True}}, _both_ends
    ),
    _ANY_SENTENCEPIECE: _Class(sentencepiece_tokenizer, {}, _optional),
}
_READERS = {
    "vocab.json": ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "RobertaTokenizer"),
    "vocab.txt": ("BertTokenizer",),
    "SentencePiece": (
        "LlamaTokenizer",
        "GemmaTokenizer",
        "T5Tokenizer",
        "XLMRobertaTokenizer",
        "CamembertTokenizer",
    ),
}
"""Classes that read a file, the most general one first."""
_ALIASES = {
    "CodeLlamaTokenizer": "LlamaTokenizer",
    "CodeGenTokenizer": "GPT2Tokenizer",
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    "LongformerTokenizer": "RobertaTokenizer",
    "MT5Tokenizer": "T5Tokenizer",
}
"""Classes that equal another one."""
_GENERIC = "", "PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"
_BY_TYPE = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("olmoe", "gpt_neox"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5Tokenizer"),
    "roberta": "RobertaTokenizer",
    "bert": "BertTokenizer",
    "llama": "LlamaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
}
"""Classes of the families that name none."""
