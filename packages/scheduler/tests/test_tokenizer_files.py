"""A completed tokenizer is equal to transformers' `AutoTokenizer` of the same directory."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from tercet.scheduler.tokenizer_files import complete_tokenizer, tokenizer_end_ids

WORDS = ["a", "b", "ab", "<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<tool>", "▁a", "x"]
TEXTS = ["a b ab", "<|im_start|>a<|im_end|>", "a<tool>b </s>", "<new>a <new>", "x<far>b", " <|im_end|> a", "<s>ab</s>"]


def base(added: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a small tokenizer.json with these added tokens."""
    characters = sorted(set("".join([*TEXTS, *WORDS])))
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*WORDS, *characters, "Ġ"]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="")
    file: dict[str, Any] = json.loads(tokenizer.to_str())
    file["added_tokens"] = [{"id": vocabulary[each["content"]], **each} for each in added]
    return file


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


ADDED = {
    "none": [],
    "some": [token("<s>"), token("</s>"), token("<|im_end|>", special=False)],
    "normalized": [token("<s>"), token("<|im_start|>", normalized=True), token("<tool>", special=False)],
}
DECODERS: dict[str, dict[str, Any]] = {
    "absent": {},
    "known": {"3": token("<s>"), "4": token("</s>"), "8": token("<|im_end|>")},
    "new": {"4": token("</s>"), "60": token("<new>"), "70": token("<far>", special=False, normalized=True)},
    "other flags": {"9": token("<tool>", lstrip=True, rstrip=True), "7": token("<|im_start|>", single_word=True)},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "end": {"eos_token": "<|im_end|>", "bos_token": "<s>", "pad_token": None},
    "objects": {"eos_token": {"__type": "AddedToken", **token("</s>", lstrip=True)}, "unk_token": "<unk>"},
    "further": {"eos_token": "</s>", "extra_special_tokens": ["<new>", "<tool>"]},
}
MAPS: dict[str, dict[str, Any] | None] = {
    "no map": None,
    "map": {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<s>"},
}


def write(path: Path, added: str, decoder: str, config: str, special_map: str) -> dict[str, bytes]:
    path.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGS[config]}
    if DECODERS[decoder]:
        settings["added_tokens_decoder"] = DECODERS[decoder]
    contents = {"tokenizer.json": base(ADDED[added]), "tokenizer_config.json": settings}
    if (values := MAPS[special_map]) is not None:
        contents["special_tokens_map.json"] = values
    files = {name: json.dumps(value).encode() for name, value in contents.items()}
    for name, data in files.items():
        (path / name).write_bytes(data)
    return files


GRID = [*itertools.product(ADDED, DECODERS, CONFIGS, MAPS)]


@pytest.mark.parametrize("case", GRID, ids="-".join)
def test_a_completed_tokenizer_equals_transformers(case: tuple[str, str, str, str], tmp_path: Path) -> None:
    files = write(tmp_path, *case)
    expected = AutoTokenizer.from_pretrained(str(tmp_path))
    files["tokenizer.json"] = complete_tokenizer(files)
    ours = Tokenizer.from_str(files["tokenizer.json"].decode())
    rng = random.Random(str(case))
    for text in [*TEXTS, *("".join(rng.sample(TEXTS, 3)) for _ in range(3))]:
        ids = expected(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids, skip_special_tokens=True) == expected.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    end = [] if expected.eos_token is None else [expected.eos_token_id]
    assert tokenizer_end_ids(files) == end


def test_a_complete_file_is_left_as_it_is() -> None:
    text = json.dumps(base([token("<s>"), token("</s>")]), indent=1).encode()
    config = {"eos_token": "</s>", "added_tokens_decoder": {"3": token("<s>"), "4": token("</s>")}}
    assert complete_tokenizer({"tokenizer.json": text, "tokenizer_config.json": json.dumps(config).encode()}) is text
    assert complete_tokenizer({"tokenizer.json": text}) is text


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": 3},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": token("a")}},
        {"added_tokens_decoder": {"1": {"content": ""}}},
        {"added_tokens_decoder": {"1": {**token("q"), "lstrip": 3}}},
        {"extra_special_tokens": [None]},
        {"extra_special_tokens": 3},
        {"additional_special_tokens": "<a>"},
    ],
    ids=str,
)
def test_declarations_that_are_not_tokens_are_refused(config: dict[str, Any]) -> None:
    files = {"tokenizer.json": json.dumps(base([])).encode(), "tokenizer_config.json": json.dumps(config).encode()}
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        complete_tokenizer(files)
