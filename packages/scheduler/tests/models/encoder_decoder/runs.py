"""A core over a real worker of a model with an encoder of text, and what transformers answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.testing import Driver, request

ANSWER = 110


def text(length: int, size: int = 250) -> list[int]:
    """Return a text of so many tokens, different for each length."""
    random = np.random.default_rng(length)
    return [0, *random.integers(3, size, length - 2).tolist(), 2] if length > 2 else [0, 2][:length]


class Run:
    """The core and the worker."""

    def __init__(self, directory: Path, *, overlap: int = 0, config: Mapping[str, Any] = {}, **options: Any) -> None:
        made: dict[str, Any] = {"device": "cpu", "slots": 4, "page_size": 4, "kv_cache_bytes": 1 << 22}
        self.worker = TpModelWorker(WorkerOptions(model=directory, **(made | options)))
        core = CoreConfig(**{"token_budget": 512, **config})
        self.driver = Driver(self.worker.capacity, core, executor=self.worker, overlap=overlap)
        assert self.worker.capacity.texts is not None
        self.start = self.worker.capacity.texts.form.start

    def send(self, rid: str, read: Sequence[int], **more: Any) -> TokenizedGenerateReqInput:
        given = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        asked = request(rid, self.start, text=read, **(given | more))
        self.driver.send(asked)
        return asked

    def answers(self, texts: Sequence[Sequence[int]], **more: Any) -> list[list[int]]:
        """Return the answers to requests that run side by side."""
        rids = [f"r{len(self.driver.output) + number}" for number in range(len(texts))]
        for rid, read in zip(rids, texts, strict=True):
            self.send(rid, read, **more)
        self.driver.run()
        self.driver.assert_empty()
        return [self.driver.output[rid, 0] for rid in rids]


class Reference:
    """transformers' greedy `generate`."""

    def __init__(self, directory: Path) -> None:
        model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval()
        self._known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    @torch.inference_mode()
    def generate(self, read: Sequence[int], tokens: int) -> list[int]:
        """Return all tokens of the decoder, by the model's own generation settings."""
        out: list[int] = self._model.generate(torch.tensor([read]), max_new_tokens=tokens)[0].tolist()
        return out

    def answer(self, read: Sequence[int], start: Sequence[int]) -> list[int]:
        """Return the tokens after `start`."""
        return self._generated(read, start)[0]

    def logprobs(self, read: Sequence[int], start: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities [tokens, vocab] of the tokens after `start`."""
        return self._generated(read, start)[1]

    @torch.inference_mode()
    def _generated(self, read: Sequence[int], start: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        key = (*read, -1, *start)
        if key not in self._known:
            out = self._model.generate(
                torch.tensor([read]),
                attention_mask=torch.ones(1, len(read), dtype=torch.int64),
                decoder_input_ids=torch.tensor([start]),
                max_new_tokens=ANSWER,
                eos_token_id=[],
                forced_bos_token_id=None,
                do_sample=False,
                num_beams=1,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logits = torch.cat(out.logits)
            self._known[key] = out.sequences[0, len(start) :].tolist(), logits.log_softmax(-1)
        return self._known[key]
