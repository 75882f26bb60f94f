"""A checkpoint in float16 on a CPU: in bfloat16 on native kernels, unless float16 is asked for."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.protocol.messages.values import SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions

PROMPT = list(range(3, 33))
COUNT = 20
SAID = "weights saved in float16 are computed in bfloat16, which is faster on a CPU"


@pytest.fixture
def half(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint saved in float16."""
    directory = shutil.copytree(checkpoints("llama"), tmp_path / "half")
    config, weights = directory / "config.json", directory / "model.safetensors"
    config.write_text(config.read_text().replace('"float32"', '"float16"'))
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    return directory


def likeliest(directory: Path, dtype: str = "auto") -> torch.Tensor:
    """The largest log-probabilities of the token after the prompt."""
    worker = TpModelWorker(WorkerOptions(model=directory, dtype=dtype, device="cpu", slots=1, page_size=8))
    init = SlotInit(
        slot=0,
        tokens=pack_ints(PROMPT),
        prompt_tokens=len(PROMPT),
        choice=0,
        sampling=SamplingParams(max_new_tokens=9, temperature=0.0),
        top_logprobs=COUNT,
    )
    rows = [Row(0, 0, len(PROMPT), sample=True)]
    result = worker.submit(Plan(step=0, introduce=[init], pages=[PageUpdate(0, 0, [[1, 3, 0, 2]])], rows=rows)).result()
    worker.close()
    return torch.tensor(unpack_floats(result.logprobs[0].top_logprobs))


@torch.inference_mode()
def expected(model: Any) -> torch.Tensor:
    """The same of transformers' model."""
    logits = model(torch.tensor([PROMPT])).logits[0, -1]
    values: torch.Tensor = logits.float().log_softmax(-1).topk(COUNT).values
    return values


def test_auto_is_bfloat16_and_as_near_as_transformers(
    half: Path, reference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ours = likeliest(half)
    assert [record.message for record in caplog.records].count(SAID) == 1
    assert "runs on torch" not in caplog.text
    assert torch.equal(ours, likeliest(half, "bfloat16"))
    exact = expected(reference(half))
    theirs = expected(reference(half, torch.bfloat16))
    assert 0 < (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_float16_that_is_asked_for_stays_and_is_said_to_be_slow(
    half: Path, reference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    ours = likeliest(half, "float16")
    assert "float16 runs on torch here, many times slower than bfloat16 or float32" in caplog.text
    assert SAID not in caplog.text
    exact = expected(reference(half))
    assert (ours - exact).abs().max() < 0.1 * (likeliest(half) - exact).abs().max() + 0.02
