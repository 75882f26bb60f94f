"""Damaged models and adapters: each is read, or refused in one line, and a worker that serves goes on."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from packages.scheduler.tests.executor.encoders.encoders import maker
from packages.scheduler.tests.models.test_hugging_face import make

Checkpoints = Callable[[str], Path]
FAMILIES = ["llama_yarn", "gemma3", "deepseek_v3_moe", "phi3_longrope", "qwen3_moe", "glm4_moe", "granite", "mistral"]


def fuzz(kind: str, sample: Path, scratch: Path, *, count: int, seconds: float, first: int = 0) -> None:
    """Run the program, and expect that it ends well."""
    command = [sys.executable, "-m", "packages.scheduler.tests.file_fuzz", kind, str(scratch), str(sample)]
    command += [str(first), str(count), str(seconds)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert " refused\n" in ended.stdout


@pytest.mark.parametrize("kind", ["start", "weights", "adapter"])
def test_damaged_files_are_read_or_refused_in_one_line(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    fuzz(kind, checkpoints("llama"), tmp_path, count=300, seconds=7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "weights", "adapter"])
@pytest.mark.parametrize("family", [*FAMILIES, "llama/sharded"])
def test_those_of_all_families(kind: str, family: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    if kind == "adapter" and family == "deepseek_v3_moe":
        pytest.skip("models with latent attention run no adapters")
    fuzz(kind, checkpoints(family), tmp_path, count=100_000, seconds=25, first=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Olmo2", "Cohere2"])
def test_those_of_models_on_transformers_modules(family: str, tmp_path: Path) -> None:
    sample = make(family, tmp_path / "sample")
    (sample / "tokenizer.json").write_text("{}")
    fuzz("start", sample, tmp_path / "scratch", count=100_000, seconds=25)


@pytest.mark.parametrize("architecture", ["BertModel", pytest.param("ModernBertModel", marks=pytest.mark.slow)])
def test_those_of_encoders(architecture: str, tmp_path: Path) -> None:
    sample, _ = maker(lambda name: tmp_path / name)(architecture, {}, torch.float32)
    (sample / "tokenizer.json").write_text("{}")
    (sample / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]'
    )
    (sample / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": true}')
    (sample / "1_Pooling").mkdir()
    (sample / "1_Pooling" / "config.json").write_text(
        '{"pooling_mode_mean_tokens": true, "word_embedding_dimension": 8}'
    )
    fuzz("start", sample, tmp_path / "scratch", count=200, seconds=5)
