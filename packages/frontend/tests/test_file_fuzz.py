"""Damaged model files are read, or refused in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

MORE = {
    "generation_config.json": b'{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2]}',
    "config.json": b'{"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}, "problem_type": "regression"}',
    "special_tokens_map.json": b'{"eos_token": {"content": "<|im_end|>"}}',
    "config_sentence_transformers.json": b'{"prompts": {"query": "q: "}, "default_prompt_name": "query"}',
    "sentence_bert_config.json": b'{"max_seq_length": 32, "do_lower_case": true}',
}


def fuzz(files: dict[str, bytes], sample: Path, *, count: int, seconds: float, first: int = 0) -> None:
    """Run the fuzzer and expect success."""
    for name, content in {**MORE, **files}.items():
        (sample / name).write_bytes(content)
    command = [sys.executable, "-m", "packages.frontend.tests.file_fuzz", str(sample), str(first), str(count)]
    ended = subprocess.run([*command, str(seconds)], capture_output=True, text=True, timeout=seconds + 120, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert " refused\n" in ended.stdout


def test_damaged_files_are_read_or_refused_in_one_line(files: dict[str, bytes], tmp_path: Path) -> None:
    fuzz(files, tmp_path, count=2000, seconds=8)


@pytest.mark.slow
def test_many_damaged_files(files: dict[str, bytes], tmp_path: Path) -> None:
    fuzz(files, tmp_path, count=1_000_000, seconds=120, first=10_000)
