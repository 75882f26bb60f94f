"""Tokenizers of GGUF files from SentencePiece models, against SentencePiece."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tercet.scheduler.formats.sentencepiece_model import read_sentencepiece
from tercet.scheduler.gguf.gguf_paths import GGUFError
from tercet.scheduler.gguf.gguf_tokenizer import GGUFTokenizer

GOLDENS = json.loads((Path(__file__).parents[1] / "formats" / "sentencepiece_goldens.json").read_text())
EXPECTED = {case["model"]: case for case in GOLDENS["sentencepiece"]}


def metadata(name: str) -> dict[str, Any]:
    """Return the fields that llama.cpp's converter writes for a SentencePiece model."""
    model = read_sentencepiece(base64.b64decode(GOLDENS["models"][name]))
    fields = {
        "model": "t5" if name == "unigram" else "llama",
        "tokens": [piece.text for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [int(piece.kind) for piece in model.pieces],
        "add_space_prefix": model.add_dummy_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces,
        "precompiled_charsmap": list(model.charsmap),
        "bos_token_id": model.bos_id,
        "eos_token_id": model.eos_id,
        "unknown_token_id": model.unk_id,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sentencepiece_vocabulary_equals_sentencepiece(name: str) -> None:
    made = GGUFTokenizer(metadata(name), Path("m.gguf")).files()["tokenizer.json"]
    tokenizer = Tokenizer.from_str(made.decode())
    for text, ids in zip(EXPECTED[name]["texts"], EXPECTED[name]["ids"], strict=True):
        assert tokenizer.encode(text).ids == ids, text


def test_a_vocabulary_of_endless_pieces_is_refused() -> None:
    fields = metadata("llama")
    fields["tokenizer.ggml.tokens"][-1] = "a" * 30_000
    with pytest.raises(GGUFError, match=r"m\.gguf: tokenizer\.ggml\.tokens: its pieces are too long"):
        GGUFTokenizer(fields, Path("m.gguf")).files()


def test_scores_must_be_as_many_as_tokens() -> None:
    for name in ("llama", "unigram"):
        fields = metadata(name)
        fields["tokenizer.ggml.scores"].pop()
        with pytest.raises(GGUFError, match=r"scores: has \d+ entries for \d+ tokens"):
            GGUFTokenizer(fields, Path("m.gguf")).files()
