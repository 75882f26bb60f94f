"""Maker of sentencepiece_goldens.json: tiny SentencePiece models, and how other libraries tokenize with them.

Run it where `sentencepiece` and `protobuf` are installed beside transformers, from the repository's root:
`python packages/scheduler/tests/formats/make_sentencepiece_goldens.py`.
"""

import base64
import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaTokenizer

GOLDENS = Path(__file__).with_name("sentencepiece_goldens.json")
CORPUS = Path("docs/glossary.md")
TEXTS = [
    *("", " ", "Hello world", " two  spaces ", "a\nb\n\nc\t d", "Größe fließt naïve", "日本語の文章です。"),
    *("привет мир", "😀 emoji", "request 12345", "<s>hi</s>", "tenant<mask>page", "</s> after", "x ▁ y", "   three"),
    *("<start_of_turn>user\nhi<end_of_turn>", " hi <extra_id_0> there", "<special>x", "ﬁnal\u3000ABBA\u00a0x"),
    "A prefix cache, pages and tokens. The scheduler's core admits a request; the detokenizer ends it.",
]
BPE = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "character_coverage": 0.985,
    "remove_extra_whitespaces": False,
    "split_digits": True,
}
TURNS = ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n\n", "▁▁", "▁▁▁"]
RULES = "41\t61\n42\t62\nFB01\t66 69\n3000\t20\n9\t20\nA\t20\nDF\t73 73\n"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**BPE, "vocab_size": 600},
    "gemma": {
        **BPE,
        "vocab_size": 620,
        "add_dummy_prefix": False,
        "user_defined_symbols": TURNS,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    },
    "t5": {
        "vocab_size": 300,
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 2,
        "bos_id": -1,
        "normalization_rule_name": "identity",
    },
    "xlm_roberta": {"vocab_size": 300, "rules": RULES},
    "camembert": {"vocab_size": 300, "normalization_rule_name": "identity", "user_defined_symbols": ["<special>"]},
    "unigram": {"vocab_size": 320, "rules": RULES, "user_defined_symbols": ["<special>"], "bos_piece": "<bos>"},
}
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, "llama"),
    ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, "llama"),
    ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, "llama"),
    ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, "mistral"),
    (
        "llama",
        "tokenizer.model",
        {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|end|>", "bos_token": None},
        "llama",
    ),
    ("gemma", "tokenizer.model", {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}, "gemma"),
    ("t5", "spiece.model", {"tokenizer_class": "T5Tokenizer", "extra_ids": 10}, "t5"),
    ("xlm_roberta", "sentencepiece.bpe.model", {"tokenizer_class": "XLMRobertaTokenizer"}, "xlm-roberta"),
    ("xlm_roberta", "sentencepiece.bpe.model", {}, "xlm-roberta"),
    ("camembert", "sentencepiece.bpe.model", {"tokenizer_class": "CamembertTokenizer"}, "camembert"),
]
"""Model, its file's name, tokenizer_config.json, and the family in config.json."""
PLAIN = ["llama", "gemma", "unigram"]
"""Models whose pieces SentencePiece itself finds in `PLAIN_TEXTS`."""
PLAIN_TEXTS = [text for text in TEXTS if text.strip() == text and "<" not in text and "  " not in text]


def train(library: Any, name: str, folder: Path) -> bytes:
    """Return the file of a model that was trained on the corpus."""
    options = {"model_type": "unigram", **MODELS[name]}
    if rules := options.pop("rules", ""):
        (folder / "rules.tsv").write_text(rules)
        options["normalization_rule_tsv"] = str(folder / "rules.tsv")
    lines = [line for line in CORPUS.read_text().split("\n") if line.strip()] + [*TEXTS[5:8]]
    (folder / "corpus.txt").write_text("\n".join(lines) * 3)
    library.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / name), minloglevel=2, **options
    )
    return (folder / f"{name}.model").read_bytes()


def expected(folder: Path, family: str) -> list[dict[str, Any]]:
    """Return how transformers tokenizes each text with the files in a folder."""
    # For other families than its own AutoTokenizer would take a class that leaves out the space before a text.
    tokenizer = (LlamaTokenizer if family == "mistral" else AutoTokenizer).from_pretrained(str(folder))
    found = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append({"text": text, "ids": ids, "plain": plain, "decoded": decoded})
    return found


def main() -> None:
    library = import_module("sentencepiece")
    goldens: dict[str, Any] = {"models": {}, "cases": [], "sentencepiece": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {model: train(library, model, folder) for model in MODELS}
        for number, (model, file, config, family) in enumerate(CASES):
            directory = folder / str(number)
            directory.mkdir()
            (directory / file).write_bytes(models[model])
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
            (directory / "config.json").write_text(json.dumps({"model_type": family}))
            case = {"model": model, "file": file, "config": config, "family": family}
            goldens["cases"].append({**case, "expected": expected(directory, family)})
        for model in PLAIN:
            processor = library.SentencePieceProcessor(model_proto=models[model])
            ids = [processor.encode(text) for text in PLAIN_TEXTS]
            goldens["sentencepiece"].append({"model": model, "texts": PLAIN_TEXTS, "ids": ids})
    goldens["models"] = {model: base64.b64encode(content).decode() for model, content in models.items()}
    GOLDENS.write_text(json.dumps(goldens, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
