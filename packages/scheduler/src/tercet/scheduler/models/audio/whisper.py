"""Audio of Whisper: log-mel features of 30 s, and an encoder whose positions are 20 ms each."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tercet.protocol.messages.audio import AudioFormat, TranscriptTokens
from tercet.scheduler.model_files import ModelError, read_json, tokenizer_files
from tercet.scheduler.models.audio.audio_model import Alignment, AudioEncoder, AudioModel, TranscriptRules
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.tokenizer_files import added_token_texts

_FILE, _COMMON_FILE = "preprocessor_config.json", "processor_config.json"
_SIZES = {"sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""Fields of the feature extractor, with transformers' defaults."""
_USUAL = {"dither": 0.0, "padding_value": 0.0, "do_normalize": False}
_STRIDE = 2
"""Features for each position of the encoder."""
_MULTILINGUAL_VOCABULARY = 51_865
"""Tokens of the smallest vocabulary with languages."""
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
"""Texts of the token of audio without speech; the second is an older one."""
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_ENCODER = (
    *("d_model", "num_mel_bins", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("max_source_positions", "activation_function"),
)
"""Fields of config.json that shape the encoder."""


def audio_model(directory: Path) -> AudioModel:
    """Return the audio of the model in a directory. Raise ModelError for features that are not supported."""
    config = read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = {**config, **(read_json(generation_file) if generation_file.is_file() else {})}
    sizes = feature_sizes(directory)
    positions = Fields(config).count("max_source_positions", 1500)
    rate, hop = sizes["sampling_rate"], sizes["hop_length"]
    if sizes["chunk_length"] * rate != positions * _STRIDE * hop:
        raise ModelError(f"{_FILE}: chunk_length {sizes['chunk_length']} is not {positions} positions of config.json")
    alignment = _alignment(config, generation)
    return AudioModel(
        form=AudioFormat(
            rate=rate,
            samples=sizes["chunk_length"] * rate,
            tokens=_tokens(directory, config, generation, hop * _STRIDE / rate),
            token_times=alignment is not None,
        ),
        positions=positions,
        rules=_rules(config, generation),
        alignment=alignment,
        build=partial(_build, config, sizes),
    )


def feature_sizes(directory: Path) -> dict[str, int]:
    """Return the sizes of the feature extractor, which transformers 5 writes into a file with the tokenizer's."""
    given: Any = {}
    if (directory / _FILE).is_file():
        given = read_json(directory / _FILE)
    elif (directory / _COMMON_FILE).is_file():
        given = read_json(directory / _COMMON_FILE).get("feature_extractor") or {}
    for name, usual in _USUAL.items():
        if given.get(name) not in (usual, None):
            raise ModelError(f"{_FILE}: {name} {given[name]!r} is not supported")
    fields = Fields(given)
    return {name: fields.count(name, usual) for name, usual in _SIZES.items()}


def _tokens(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any], seconds: float
) -> TranscriptTokens:
    ids = {text: token for token, text in added_token_texts(tokenizer_files(directory)).items()}
    lacking = [text for text in ("<|startoftranscript|>", "<|notimestamps|>") if text not in ids]
    if lacking:
        raise ModelError(f"tokenizer.json lacks {' and '.join(lacking)}")
    several = generation.get("is_multilingual")
    if several is None:
        several = config.get("vocab_size", 0) >= _MULTILINGUAL_VOCABULARY
    names = {match[1]: token for text, token in ids.items() if (match := _LANGUAGE.fullmatch(text))}
    return TranscriptTokens(
        start=ids["<|startoftranscript|>"],
        no_timestamps=ids["<|notimestamps|>"],
        first_timestamp=ids["<|notimestamps|>"] + 1,
        timestamp_seconds=seconds,
        previous=ids.get("<|startofprev|>"),
        transcribe=ids.get("<|transcribe|>") if several else None,
        translate=ids.get("<|translate|>") if several else None,
        no_speech=next((ids[text] for text in _NO_SPEECH if text in ids), None),
        languages=names if several else {},
    )


def _rules(config: Mapping[str, Any], generation: Mapping[str, Any]) -> TranscriptRules:
    end, size = generation.get("eos_token_id"), config.get("vocab_size", 0)
    if isinstance(end, list):
        end = end[0] if end else None
    if type(end) is not int:
        raise ModelError("generation_config.json: eos_token_id: must name the token that ends transcripts")
    lists: dict[str, tuple[int, ...]] = {}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        given = generation.get(name) or []
        if not isinstance(given, list) or any(type(token) is not int for token in given):
            raise ModelError(f"generation_config.json: {name}: must be a list of token ids")
        lists[name] = tuple(token for token in given if 0 <= token < size)
    most = generation.get("max_initial_timestamp_index")
    return TranscriptRules(
        suppressed=lists["suppress_tokens"],
        suppressed_first=lists["begin_suppress_tokens"],
        end=end,
        most_initial=most if type(most) is int else None,
    )


def _alignment(config: Mapping[str, Any], generation: Mapping[str, Any]) -> Alignment | None:
    given = generation.get("alignment_heads")
    if given is None:
        return None
    fields = Fields(config)
    layers, heads = fields.count("decoder_layers", 4), fields.count("decoder_attention_heads", 6)
    pairs = given if isinstance(given, list) else []
    if not pairs or not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise ModelError("generation_config.json: alignment_heads: must be a list of a layer and a head each")
    known = {(layer, head) for layer in range(layers) for head in range(heads)}
    if not all((layer, head) in known for layer, head in pairs):
        raise ModelError(f"generation_config.json: alignment_heads: must be of {layers} layers with {heads} heads")
    median = fields.count("median_filter_width", 7)
    if median % 2 == 0:
        raise ModelError(f"config.json: median_filter_width: {median} is not odd")
    return Alignment(heads=tuple((layer, head) for layer, head in pairs), median=median)


def _build(config: Mapping[str, Any], sizes: Mapping[str, int]) -> AudioEncoder:
    from transformers import WhisperConfig, WhisperFeatureExtractor
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    known = WhisperConfig(**{name: config[name] for name in _ENCODER if name in config})
    with torch.device("cpu"):
        features = WhisperFeatureExtractor(feature_size=known.num_mel_bins, **sizes)
    return AudioEncoder(WhisperEncoder(known), features, sizes["sampling_rate"])
