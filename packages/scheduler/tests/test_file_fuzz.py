"""Damaged models and adapters: each is read, or refused in one line, and a worker that serves goes on."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from packages.kernels.tests.forks import Forks
from packages.scheduler.tests.executor.encoders.encoders import maker
from packages.scheduler.tests.models.test_hugging_face import make

Checkpoints = Callable[[str], Path]
FAMILIES = ["llama_yarn", "gemma3", "deepseek_v3_moe", "phi3_longrope", "qwen3_moe", "glm4_moe", "granite", "mistral"]


PROGRAM = "packages.scheduler.tests.file_fuzz"


class Fuzzer:
    """Runs of the program, which imports once for all of them."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def run(self, kind: str, sample: Path, scratch: Path, *, count: int, seconds: float, first: int = 0) -> None:
        """Run the program, and expect that it ends well."""
        words = [kind, str(scratch), str(sample), str(first), str(count), str(seconds)]
        ended = self._forks.run("-m", PROGRAM, *words, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert " refused\n" in ended.stdout


@pytest.fixture(scope="module")
def fuzzer() -> Iterator[Fuzzer]:
    forks = Forks(PROGRAM, env=os.environ)
    yield Fuzzer(forks)
    forks.close()


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["start", "weights", "adapter"])
def test_damaged_files_are_read_or_refused_in_one_line(
    kind: str, count: int, checkpoints: Checkpoints, fuzzer: Fuzzer, tmp_path: Path
) -> None:
    fuzzer.run(kind, checkpoints("llama"), tmp_path, count=count, seconds=count / 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["start", "weights", "adapter"])
@pytest.mark.parametrize("family", [*FAMILIES, "llama/sharded"])
def test_those_of_all_families(
    kind: str, family: str, checkpoints: Checkpoints, fuzzer: Fuzzer, tmp_path: Path
) -> None:
    if kind == "adapter" and family == "deepseek_v3_moe":
        pytest.skip("models with latent attention run no adapters")
    fuzzer.run(kind, checkpoints(family), tmp_path, count=100_000, seconds=25, first=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Olmo2", "Cohere2"])
def test_those_of_models_on_transformers_modules(family: str, fuzzer: Fuzzer, tmp_path: Path) -> None:
    sample = make(family, tmp_path / "sample")
    (sample / "tokenizer.json").write_text("{}")
    fuzzer.run("start", sample, tmp_path / "scratch", count=100_000, seconds=25)


@pytest.mark.parametrize("architecture", ["BertModel", pytest.param("ModernBertModel", marks=pytest.mark.slow)])
def test_those_of_encoders(architecture: str, fuzzer: Fuzzer, tmp_path: Path) -> None:
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
    fuzzer.run("start", sample, tmp_path / "scratch", count=100, seconds=4)
