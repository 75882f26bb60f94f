"""Tokenizer files that the metadata of a GGUF file stands for."""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tercet.scheduler.formats.sentencepiece_model import PieceKind
from tercet.scheduler.formats.sentencepiece_tokenizer import SPACE, piece_merges
from tercet.scheduler.gguf.gguf_paths import GGUFError
from tercet.scheduler.gguf.pre_tokenizers import begins_with_bos, ignores_merges, pre_tokenizer

_END_NAMES = ("eos", "eot", "eom")
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<end_of_utterance>",
)
"""Control tokens that end a text although a file's metadata may not say so, as llama.cpp has them."""
_TEMPLATE = "tokenizer.chat_template"


class GGUFTokenizer:
    """The tokens of a file, with the settings of `tokenizer.ggml`. Raises GGUFError for fields that are wrong."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        tokens = self._texts("tokens")
        if not tokens:
            raise self._error("tokens", "is missing")
        self._tokens = tokens
        types = self._numbers("token_type") or [PieceKind.NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise self._error("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
        self._types = types
        self._ids: dict[str, int] = {}
        for number, token in enumerate(tokens):
            self._ids.setdefault(token, number)

    def files(self) -> dict[str, bytes]:
        """Return the contents of tokenizer.json, tokenizer_config.json and the chat templates."""
        files = {"tokenizer.json": _json(self.tokenizer()), "tokenizer_config.json": _json(self._settings())}
        template, tools = self._metadata.get(_TEMPLATE), self._metadata.get(f"{_TEMPLATE}.tool_use")
        if isinstance(template, str) and template:
            files["chat_template.jinja"] = template.encode()
        if isinstance(tools, str) and tools:
            files["additional_chat_templates/tool_use.jinja"] = tools.encode()
        return files

    def tokenizer(self) -> dict[str, Any]:
        """Return the tokenizer.json."""
        kind = self._get("model", "")
        builders = {"gpt2": self._byte_level, "llama": self._sentence_piece, "t5": self._unigram}
        if kind not in builders:
            raise self._error("model", f"{str(kind)[:40]!r} is not one of {', '.join(builders)}")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            **builders[kind](),
            "post_processor": self._post_processor(),
        }

    def named_ids(self) -> dict[str, Any]:
        """Return `bos_token_id` and `eos_token_id` of config.json."""
        names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
        return {name: found for name, stored in names.items() if (found := self._id(stored)) is not None}

    def end_ids(self) -> list[int]:
        """Return the ids that end a text: end of text, turn and message, and other control tokens known to."""
        found = [self._id(f"{name}_token_id") for name in _END_NAMES]
        found += [self._ids[text] for text in _END_TEXTS if self._is_control(text)]
        if {"<|end|>", "<|return|>", "<|call|>"} <= self._ids.keys():
            # gpt-oss ends each message of an answer with <|end|>
            found = [number for number in found if number != self._ids["<|end|>"]]
        return list(dict.fromkeys(number for number in found if number is not None))

    def _is_control(self, text: str) -> bool:
        number = self._ids.get(text)
        return number is not None and self._types[number] in (PieceKind.CONTROL, PieceKind.USER_DEFINED)

    def _byte_level(self) -> dict[str, Any]:
        """Return BPE over bytes written as characters, with the pre-tokenizer that `pre` names."""
        pre = str(self._get("pre", "default"))
        merges = [tuple(_pair(merge)) for merge in self._texts("merges")]
        if any(len(pair) != 2 for pair in merges):
            raise self._error("merges", "a merge is no pair")
        if any(
            left not in self._ids or right not in self._ids or left + right not in self._ids for left, right in merges
        ):
            raise self._error("merges", "a merge has parts that are no tokens")
        model = _bpe(self._vocabulary(), merges, ignore_merges=ignores_merges(pre))
        try:
            normalizer, splits = pre_tokenizer(pre)
        except KeyError:
            raise self._error("pre", f"{pre[:40]!r} is not known") from None
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {"normalizer": normalizer, "pre_tokenizer": splits, "decoder": decoder, "model": model}

    def _sentence_piece(self) -> dict[str, Any]:
        """Return SentencePiece's BPE: adjacent pieces merge in the order of the results' scores."""
        scores = self._scores()
        unknown = self._id("unknown_token_id")
        unknown = self._ids.get("<unk>") if unknown is None else unknown
        model = _bpe(
            self._vocabulary(),
            self._piece_merges(scores),
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=PieceKind.BYTE in self._types,
        )
        prefixed = self._flag("add_space_prefix", True)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prefix = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
        back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "model": model,
        }

    def _unigram(self) -> dict[str, Any]:
        """Return SentencePiece's unigram model, with its table of characters if the file has one."""
        scores = self._scores()
        prepend = "always" if self._flag("add_space_prefix", True) else "never"
        spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepend, "split": True}
        table = self._numbers("precompiled_charsmap")
        normalizers: list[dict[str, Any]] = []
        if table:
            charsmap = base64.b64encode(bytes(int(each) & 255 for each in table)).decode()
            normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if self._flag("remove_extra_whitespaces", True):
            normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        unknown = self._id("unknown_token_id")
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
            "pre_tokenizer": spaces,
            "decoder": spaces,
            "model": {
                "type": "Unigram",
                "unk_id": 0 if unknown is None else unknown,
                "vocab": [[token, score] for token, score in zip(self._unique(), scores, strict=True)],
                "byte_fallback": PieceKind.BYTE in self._types,
            },
        }

    def _unique(self) -> Iterator[str]:
        """Yield the tokens; one that is there twice gets a name of its own, which no text has."""
        for number, token in enumerate(self._tokens):
            yield token if self._ids[token] == number else f"\0{number}"

    def _vocabulary(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self._unique())}

    def _scores(self) -> list[float]:
        scores = self._numbers("scores")
        if len(scores) != len(self._tokens):
            raise self._error("scores", f"has {len(scores)} entries for {len(self._tokens)} tokens")
        return scores

    def _piece_merges(self, scores: list[float]) -> list[tuple[str, str]]:
        """Return the merges of the tokens that may take part in them."""
        apart = PieceKind.CONTROL, PieceKind.UNKNOWN, PieceKind.BYTE, PieceKind.UNUSED
        pieces = {token: number for token, number in self._ids.items() if self._types[number] not in apart}
        try:
            return piece_merges(pieces, [-score for score in scores])
        except ValueError as error:
            raise self._error("tokens", str(error)) from None

    def _added(self) -> list[dict[str, Any]]:
        """Return tokens that are found in texts before anything else: special ones, and those a model's maker added."""
        kinds = PieceKind.CONTROL, PieceKind.USER_DEFINED, PieceKind.UNKNOWN
        return [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self._types[number] != PieceKind.USER_DEFINED,
            }
            for number, token in enumerate(self._tokens)
            if token and self._types[number] in kinds and self._ids[token] == number
        ]

    def _begins(self) -> bool:
        """Return whether a text begins with the token for that."""
        kind, pre = self._get("model", ""), str(self._get("pre", "default"))
        return self._flag("add_bos_token", kind == "llama" or (kind == "gpt2" and begins_with_bos(pre)))

    def _ends(self) -> bool:
        return self._flag("add_eos_token", self._get("model", "") == "t5")

    def _post_processor(self) -> dict[str, Any] | None:
        bos, eos = self._id("bos_token_id"), self._id("eos_token_id")
        before = [bos] if self._begins() and bos is not None else []
        after = [eos] if self._ends() and eos is not None else []
        if not before and not after:
            return None

        def around(name: str, kind: int) -> list[dict[str, Any]]:
            special = [
                [{"SpecialToken": {"id": self._tokens[one], "type_id": kind}} for one in ids] for ids in (before, after)
            ]
            return [*special[0], {"Sequence": {"id": name, "type_id": kind}}, *special[1]]

        used = dict.fromkeys([*before, *after])
        return {
            "type": "TemplateProcessing",
            "single": around("A", 0),
            "pair": around("A", 0) + around("B", 1),
            "special_tokens": {
                self._tokens[one]: {"id": self._tokens[one], "ids": [one], "tokens": [self._tokens[one]]}
                for one in used
            },
        }

    def _settings(self) -> dict[str, Any]:
        """Return the tokenizer_config.json."""
        stored = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: self._id(f"{each}_token_id") for name, each in stored.items()}
        named = {name: self._tokens[number] for name, number in ids.items() if number is not None}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._begins(),
            "add_eos_token": self._ends(),
            **named,
        }

    def _get(self, name: str, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        return default if value is None else value

    def _flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, f"{str(value)[:40]!r} is neither true nor false")
        return value

    def _id(self, name: str) -> int | None:
        """Return the id of a token, None if the file names none or one outside the vocabulary."""
        value = self._get(name)
        if value is not None and type(value) is not int:
            raise self._error(name, f"{str(value)[:40]!r} is no token id")
        return value if value is not None and 0 <= value < len(self._tokens) else None

    def _texts(self, name: str) -> list[str]:
        values = self._get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self._error(name, "is no list of texts")
        return values

    def _numbers(self, name: str) -> list[Any]:
        values = self._get(name, [])
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise self._error(name, "is no list of numbers")
        return values

    def _error(self, name: str, problem: str) -> GGUFError:
        return GGUFError(f"{self._path}: tokenizer.ggml.{name}: {problem}")


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _pair(merge: str) -> list[str]:
    """Return the parts of a merge. A space within one is at its beginning."""
    cut = merge.find(" ", 1)
    return [merge[:cut], merge[cut + 1 :]] if cut > 0 else [merge]


def _bpe(vocabulary: Mapping[str, int], merges: list[Any], **settings: Any) -> dict[str, Any]:
    defaults = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", "dropout": None, **defaults, **settings, "vocab": vocabulary, "merges": merges}
