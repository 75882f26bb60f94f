"""Tokenizers of encoders: lower-case words and a post-processor template."""

import json

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tercet.protocol.messages.values import ModelLimits, Task

WORDS = ["a", "cat", "dog", "sat", "on", "the", "mat", "rain", "fell", "query", ":", "[", "]", "sep", "##s"]


def tokenizer(template: str = "bert") -> Tokenizer:
    """Create a tokenizer with the template of a family.

    `bert`: [CLS] A [SEP] B [SEP] with types; `roberta`: [CLS] A [SEP] [SEP] B [SEP]; `last`: A [SEP]; `none`.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    match template:
        case "bert":
            made.post_processor = processors.TemplateProcessing(
                "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ends
            )
        case "roberta":
            made.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
        case "last":
            made.post_processor = processors.TemplateProcessing("$A [SEP]", "$A $B [SEP]", ends)
    return made


def files(template: str = "bert", **more: object) -> dict[str, bytes]:
    """Return a model's files: the tokenizer and the given JSON files."""
    extra = {f"{name}.json": json.dumps(content).encode() for name, content in more.items()}
    return {"tokenizer.json": tokenizer(template).to_str().encode(), **extra}


def limits(task: Task = Task.EMBED, labels: tuple[str, ...] = (), context_length: int = 16) -> ModelLimits:
    """Return the limits of a model with four dimensions, or one per label."""
    return ModelLimits(
        model="encoder",
        context_length=context_length,
        vocab_size=20,
        max_total_tokens=context_length,
        task=task,
        width=len(labels) or 4,
        labels=list(labels),
    )
