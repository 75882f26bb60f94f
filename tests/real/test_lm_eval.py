"""Scores of lm-evaluation-harness: through the API as with its own transformers backend, on the same weights.

`hatch run evaluation:test` runs these tests, with the harness in an environment of its own.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server_process import Server

HARNESS = os.environ.get("TERCET_LM_EVAL", "")
"""Path of the command lm_eval."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not HARNESS, reason="TERCET_LM_EVAL does not name the command lm_eval"),
]
CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Poland Warsaw, "
    "Greece Athens, Norway Oslo, Sweden Stockholm, Hungary Budapest, Bulgaria Sofia, Egypt Cairo, Kenya Nairobi, "
    "Ghana Accra, Japan Tokyo, China Beijing, Nepal Kathmandu, Thailand Bangkok, Canada Ottawa"
)
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
CHATS = {
    "output_type": "generate_until",
    "doc_to_text": "What is the capital of {{country}}?",
    "doc_to_target": "The capital of {{country}} is {{capital}}",
    "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
PERPLEXITY = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "text",
    "metric_list": [{"metric": "bits_per_byte"}],
}


def sums() -> list[dict[str, Any]]:
    """Return additions with four results to choose from, hard enough for wrong choices."""
    source, documents = random.Random(7), []
    for number in range(40):
        one, other = source.randint(11, 89), source.randint(11, 89)
        choices = [str(one + other + offset) for offset in source.sample([-20, -10, -2, -1, 1, 2, 10, 20], 3)]
        choices.insert(number % 4, str(one + other))
        documents.append({"one": one, "other": other, "choices": choices, "gold": number % 4})
    return documents


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tasks, with their documents in local files."""
    folder = tmp_path_factory.mktemp("tasks")
    pairs = [dict(zip(("country", "capital"), pair.split(), strict=True)) for pair in CAPITALS.split(", ")]
    page = (Path(__file__).parent / "page.txt").read_text(encoding="utf-8")
    paragraphs = [{"text": text} for text in page.split("\n\n") if len(text) > 200]
    examples = "10 + 15 = 25\n31 + 42 = 73\n{{one}} + {{other}} ="
    write(folder, "sums", sums(), {**CHOICE, "doc_to_text": examples})
    write(folder, "page", paragraphs, PERPLEXITY)
    write(folder, "capitals", pairs, CHATS)
    return folder


def write(folder: Path, name: str, documents: list[dict[str, Any]], task: dict[str, Any]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **task}))


def evaluate(tasks: Path, names: str, model: str, arguments: str, *options: str, key: str = "") -> dict[str, Any]:
    """Return the results of tasks and, as `responses`, what the model answered to each document."""
    out = tasks.with_name(f"{tasks.name}-{names.replace(',', '-')}-{model}")
    command = [HARNESS, "--include_path", str(tasks), "--tasks", names, "--model", model, "--model_args", arguments]
    command += ["--log_samples", "--output_path", str(out), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "OPENAI_API_KEY": key}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text())["results"]
    for name in names.split(","):
        (samples,) = out.rglob(f"samples_{name}_*.jsonl")
        lines = map(json.loads, samples.read_text().splitlines())
        found[name]["responses"] = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return found


def test_loglikelihoods_are_those_of_transformers(server: Server, checkpoint: Path, tasks: Path) -> None:
    url = f"{server.url}/v1/completions"
    arguments = f"model={server.model()},base_url={url},tokenizer={checkpoint},num_concurrent=4"
    api = evaluate(tasks, "sums,page", "local-completions", arguments, key=server.key)
    own = evaluate(tasks, "sums,page", "hf", f"pretrained={checkpoint},dtype=float32", "--device", "cpu")
    assert 0.3 < own["sums"]["acc,none"] < 1.0, "the task tells good models from bad ones"
    assert api["sums"]["acc,none"] == own["sums"]["acc,none"]
    assert api["sums"]["acc_norm,none"] == own["sums"]["acc_norm,none"]
    assert api["page"]["bits_per_byte,none"] == pytest.approx(own["page"]["bits_per_byte,none"], rel=1e-4)
    for mine, reference in zip(api["sums"]["responses"], own["sums"]["responses"], strict=True):
        values = [[float(value) for value, _ in each] for each in (mine, reference)]
        assert values[0] == pytest.approx(values[1], abs=0.01)
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in reference]


def test_answers_are_those_of_transformers(server: Server, checkpoint: Path, tasks: Path) -> None:
    arguments = f"model={server.model()},base_url={server.url}/v1/chat/completions,num_concurrent=4"
    api = evaluate(tasks, "capitals", "local-chat-completions", arguments, "--apply_chat_template", key=server.key)
    hf = f"pretrained={checkpoint},dtype=float32"
    own = evaluate(tasks, "capitals", "hf", hf, "--device", "cpu", "--apply_chat_template")
    assert 0.2 < own["capitals"]["exact_match,none"] < 1.0
    same = [
        mine == reference
        for mine, reference in zip(api["capitals"]["responses"], own["capitals"]["responses"], strict=True)
    ]
    assert sum(same) >= len(same) - 1, "more than one answer differs"
