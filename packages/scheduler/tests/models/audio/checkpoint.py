"""Small Whisper checkpoints with random weights, whose tokenizer has the tokens of transcripts."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

LANGUAGES = ("en", "de", "fr")
TIMES = 1501


def write_whisper(
    directory: Path, *, seconds: int = 30, several: bool = True, aligned: bool = True, seed: int = 0, **sizes: Any
) -> Path:
    """Write a model that takes `seconds` of audio, and has times of tokens if it is `aligned`."""
    directory.mkdir(parents=True, exist_ok=True)
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    special = ["endoftext", "startoftranscript", *LANGUAGES, *tasks]
    texts = [f"<|{name}|>" for name in special]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    times = [f"<|{0.02 * number:.2f}|>" for number in range(seconds * 50 + 1)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in times])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in texts}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    shape: dict[str, Any] = {
        "num_mel_bins": 80,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 64,
        "max_target_positions": 96,
    }
    config = transformers.WhisperConfig(
        **(shape | sizes),
        vocab_size=tokenizer.get_vocab_size(),
        max_source_positions=50 * seconds,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        init_std=0.3,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(config)
    generation: dict[str, Any] = {
        "eos_token_id": end,
        "decoder_start_token_id": start,
        "is_multilingual": several,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": [1, 2, 7, *(ids[text] for text in texts[1:-1])],
        "begin_suppress_tokens": [32, end],
        "max_initial_timestamp_index": 50,
    }
    if aligned:
        generation["alignment_heads"] = [[config.decoder_layers - 1, 1], [0, 0], [0, 1]]
    if several:
        generation["lang_to_id"] = {f"<|{name}|>": ids[f"<|{name}|>"] for name in LANGUAGES}
        generation["task_to_id"] = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(directory)
    features = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=seconds)
    features.save_pretrained(directory)
    return directory
