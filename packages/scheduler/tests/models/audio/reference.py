"""Whisper of transformers, which tells what is right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation import logits_process

from tercet.protocol.messages.audio import Transcript


class WhisperReference:
    """transformers' `generate`, with its rules for Whisper and without its search for further windows."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
            directory, attn_implementation="eager"
        )
        self._features: Any = transformers.WhisperFeatureExtractor.from_pretrained(directory)

    def _processors(self, kind: Transcript, begin: int) -> list[Any]:
        config = self._model.generation_config
        if kind is Transcript.LANGUAGE:
            languages = [*config.lang_to_id.values()]
            return [
                logits_process.SuppressTokensLogitsProcessor([*{*range(self._model.config.vocab_size)} - {*languages}])
            ]
        found = [
            logits_process.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin),
            logits_process.SuppressTokensLogitsProcessor(config.suppress_tokens),
        ]
        if kind is Transcript.TIMESTAMPS:
            found.append(logits_process.WhisperTimeStampLogitsProcessor(config, begin))
        return found

    @torch.inference_mode()
    def generate(self, samples: bytes, kind: Transcript, prompt: Sequence[int], count: int) -> Any:
        floats = np.frombuffer(samples, "<i2").astype(np.float32) / 32_768
        plain = transformers.GenerationConfig(
            eos_token_id=self._model.generation_config.eos_token_id,
            pad_token_id=self._model.generation_config.eos_token_id,
            max_new_tokens=1 if kind is Transcript.LANGUAGE else count,
            output_attentions=True,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        return transformers.GenerationMixin.generate(
            self._model,
            self._features(floats, sampling_rate=16_000, return_tensors="pt").input_features,
            generation_config=plain,
            decoder_input_ids=torch.tensor([list(prompt)]),
            logits_processor=transformers.LogitsProcessorList(self._processors(kind, len(prompt))),
        )

    def times(
        self, samples: bytes, kind: Transcript, prompt: Sequence[int], count: int
    ) -> tuple[list[int], list[float]]:
        """Return an answer, and the second at which each of its tokens but the last ends."""
        generated = self.generate(samples, kind, prompt, count)
        times = self._model._extract_token_timestamps(
            generated,
            self._model.generation_config.alignment_heads,
            num_frames=-(-len(samples) // 2 // 160),
            num_input_ids=len(prompt),
        )
        ids: list[int] = generated.sequences[0, len(prompt) :].tolist()
        return ids, times[0, len(prompt) : -1].tolist()

    def answer(self, samples: bytes, kind: Transcript, prompt: Sequence[int], count: int) -> list[int]:
        answer: list[int] = self.generate(samples, kind, prompt, count).sequences[0, len(prompt) :].tolist()
        return answer
