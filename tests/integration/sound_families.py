"""Tiny random models that hear, whole from WAV files to answers, here and in transformers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from tokenizers import AddedToken, Tokenizer
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

from packages.scheduler.tests.conftest import write_tokenizer
from tercet.frontend.manager.inputs.images import placed_images
from tercet.frontend.media.audio_pipe import ReadAudio
from tercet.frontend.media.audio_worker import audio_windows
from tercet.frontend.media.prompt_media import replacement_of
from tercet.frontend.media.sound_decoder import DecodedSound
from tercet.frontend.model.prompts import TextPrompt
from tercet.protocol.messages.audio import SoundFormat
from tests.integration.image_families import FIRST_MARK, TEXT, Parts, Prompt, Reference, Run

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "SOUND{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SECONDS = 2
"""Length of the sounds that an encoder sees at once. The features of published models are of 30 s."""
LENGTHS = {"shortest": 321, "short": 5003, "odd": 16_417, "tone": 20_000, "longest": 32_000}
"""Samples of sounds that an encoder sees at once."""
LONG = {"one sample": 1, "one more": 32_001, "three windows": 80_011}
"""Samples of sounds for encoders of whole windows."""


def sound(name: str) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Return the samples of a sound: a tone with noise."""
    count = {**LENGTHS, **LONG}[name]
    noise = np.random.default_rng(count).normal(0, 2000, count)
    samples: np.ndarray[tuple[int], np.dtype[np.int16]] = np.empty(count, np.int16)
    samples[:] = 9000 * np.sin(np.arange(count) * (0.01 + count / 2e5)) + noise
    return samples


def wav(name: str, rate: int = 16_000) -> bytes:
    file = BytesIO()
    soundfile.write(file, sound(name), rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


@dataclass(frozen=True)
class Hearing:
    """Model that hears, and the way to its inputs in transformers."""

    architecture: str
    config: Mapping[str, Any]
    """Fields of config.json beside `text_config`."""
    text_type: str
    marks: Sequence[str]
    """Tokens of sounds, in the order of their ids from `FIRST_MARK` on."""
    written: str
    """Text that the chat template writes for a sound."""
    tokens: Callable[[int], int]
    """Number of tokens of a sound, for its samples, as transformers counts them."""
    inputs: Callable[[Any, Sequence[str]], dict[str, torch.Tensor]]
    """Inputs of transformers' model, for a feature extractor and sounds."""
    refused: Sequence[tuple[Mapping[str, Any], str]]
    """Changes of config.json that are refused, and why."""
    sounds: Mapping[str, int] = field(default_factory=LENGTHS.copy)
    """Samples of the sounds that it hears, by name."""

    def write(self, directory: Path) -> Path:
        """Write the same checkpoint every time."""
        kind = getattr(transformers, self.architecture)
        config = kind.config_class(text_config={**TEXT, "model_type": self.text_type}, **self.config)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = kind(config)
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    torch.nn.init.normal_(parameter, 1.0, 0.3)
                elif "audio_tower" in name or "projector" in name:
                    torch.nn.init.normal_(parameter, 0.0, 0.3)
                elif name.endswith("embed_tokens.weight"):
                    torch.nn.init.normal_(parameter, 0.0, 0.5)
            torch.nn.init.zeros_(model.lm_head.weight[FIRST_MARK:])  # no answer has tokens of sounds
        model.save_pretrained(directory)
        features = transformers.WhisperFeatureExtractor(
            feature_size=config.audio_config.num_mel_bins, chunk_length=SECONDS
        )
        features.save_pretrained(directory)
        write_tokenizer(directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.marks])
        assert tokenizer.token_to_id(self.marks[0]) == FIRST_MARK
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(TEMPLATE.replace("SOUND", self.written))
        return directory


class HearingRun(Run):
    """Core over a real worker, which gets sounds as the frontend makes them."""

    @property
    def sounds(self) -> SoundFormat:
        form = self.worker.capacity.sounds
        assert form is not None
        return form

    def heard(self, name: str) -> DecodedSound:
        order = ReadAudio(file=wav(name), rate=self.sounds.rate, window=self.sounds.rate, seconds=5, exact=True)
        array = b"".join(samples.tobytes() for samples in audio_windows(order))
        return DecodedSound(array=array, sha256=sha256(array).digest())

    def prompt(self, parts: Parts) -> Prompt:
        ids, sounds = [1], []
        for part in parts:
            if isinstance(part, str):
                sounds.append(heard := self.heard(part))
                text = replacement_of(heard, self.sounds)
                ids += self.tokenizer.encode(text, add_special_tokens=False).ids
            else:
                ids += part
        return Prompt(ids, placed_images(sounds, TextPrompt(text="", param="prompt"), ids, self.sounds))


class HearingReference(Reference):
    """transformers' `generate` and feature extractor."""

    @torch.inference_mode()
    def logprobs(self, run: HearingRun, parts: Parts) -> list[float]:
        """Return the log-probability of each token of a prompt after the first."""
        ids = torch.tensor([run.prompt(parts).ids])
        heard = self._inputs(run, ids, [part for part in parts if isinstance(part, str)])
        scores = self._model(input_ids=ids, **heard).logits[0, :-1].log_softmax(-1)
        found: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def _inputs(self, run: Run, ids: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        features = transformers.WhisperFeatureExtractor.from_pretrained(self._directory)
        found: dict[str, torch.Tensor] = self._family.inputs(features, names) if names else {}
        return found


def _of_qwen(features: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    floats = [sound(name).astype(np.float32) / 32_768 for name in names]
    out = features(floats, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt")
    return {"input_features": out["input_features"], "feature_attention_mask": out["attention_mask"]}


def _of_voxtral(features: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    padding = {"padding": True, "truncation": False, "pad_to_multiple_of": 16_000 * SECONDS}
    processor: Any = SimpleNamespace(feature_extractor=features)
    floats = [sound(name).astype(np.float32) / 32_768 for name in names]
    kwargs = {"sampling_rate": 16_000, "return_tensors": "pt", **padding}
    made = VoxtralProcessor._retrieve_input_features(processor, floats, 100 * SECONDS, **kwargs)
    return {"input_features": made}


_ENCODER = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "d_model": 32,
    "max_source_positions": 50 * SECONDS,
}
FAMILIES = {
    "Qwen2-Audio": Hearing(
        architecture="Qwen2AudioForConditionalGeneration",
        config={
            "audio_config": {**_ENCODER, "model_type": "qwen2_audio_encoder", "encoder_ffn_dim": 48},
            "audio_token_index": FIRST_MARK,
        },
        text_type="qwen2",
        marks=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        written="<|audio_bos|><|AUDIO|><|audio_eos|>",
        tokens=lambda samples: ((-(-samples // 160) - 1) // 2 + 1 - 2) // 2 + 1,
        inputs=_of_qwen,
        refused=[({"audio_token_index": 200}, "tokenizer.json lacks the token of sounds, which is 200")],
    ),
    "Voxtral": Hearing(
        architecture="VoxtralForConditionalGeneration",
        config={
            "audio_config": {**_ENCODER, "model_type": "voxtral_encoder", "encoder_ffn_dim": 128},
            "audio_token_id": FIRST_MARK,
        },
        text_type="llama",
        marks=("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[INST]", "[/INST]"),
        written="[BEGIN_AUDIO][AUDIO]",
        tokens=lambda samples: -(-samples // (16_000 * SECONDS)) * SECONDS * 100 // 8,
        inputs=_of_voxtral,
        refused=[
            ({"audio_token_id": 200}, "tokenizer.json lacks the token of sounds, which is 200"),
            (
                {"audio_config": {**_ENCODER, "hidden_size": 32, "intermediate_size": 130}},
                "intermediate_size 130 does not hold whole positions of 32 values",
            ),
        ],
        sounds={**LENGTHS, **LONG},
    ),
}
"""Models that hear, by name."""
