"""Small checkpoints of models with an encoder and a decoder of text, with random weights of odd shapes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

BEGIN, PAD, END = 0, 1, 2
"""Ids of the special tokens, as in BART; bytes follow."""
SHAPE: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 192,
    "init_std": 0.1,
}


def write_tokenizer(directory: Path) -> int:
    """Write a tokenizer of bytes that adds both ends to a text. Return the size of its vocabulary."""
    special = ["<s>", "<pad>", "</s>"]
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({text: number for number, text in enumerate([*special, *letters])}, []))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    return tokenizer.get_vocab_size()


def write_bart(directory: Path, *, kind: str = "Bart", forced: int | None = BEGIN, seed: int = 2, **sizes: Any) -> Path:
    """Write a BART or, as the `kind`, an MBart."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory)
    config = getattr(transformers, f"{kind}Config")(
        **(SHAPE | sizes),
        vocab_size=vocabulary,
        bos_token_id=BEGIN,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=END,
        forced_eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers begins with 0
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:  # and with 1, so that answers would repeat a token
            torch.nn.init.normal_(parameter)
        elif "embed_positions" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    torch.nn.init.normal_(model.model.shared.weight, std=0.3)
    torch.nn.init.normal_(model.final_logits_bias, std=0.3)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BEGIN,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=END,
        forced_bos_token_id=forced,
    )
    model.save_pretrained(directory)
    return directory


HALF: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 192,
    "query_pre_attn_scalar": 12,
    "sliding_window": 20,
}


def write_t5gemma(
    directory: Path, *, encoder: Mapping[str, Any] = {}, decoder: Mapping[str, Any] = {}, tied: bool = True
) -> Path:
    """Write a T5Gemma, whose encoder and decoder have sizes of their own."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = {"vocab_size": write_tokenizer(directory), "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    module = transformers.T5GemmaModuleConfig
    config = transformers.T5GemmaConfig(
        encoder=module(**{**HALF, **ends, **encoder}),
        decoder=module(**{**HALF, **ends, **decoder}),
        tie_word_embeddings=tied,
        **ends,
    )
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "norm" in name else 0.2)
    model.save_pretrained(directory)
    return directory
