"""A model on transformers' own modules, served and killed like any other."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from openai import OpenAI

from tests.e2e.random_checkpoint import PLAIN, write
from tests.server_process import Server

SLIDES = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
TOKENS = 60


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("cohere") / "tiny-cohere", PLAIN, "Cohere2", **SLIDES)


@pytest.fixture(scope="module")
def hosted(start: Callable[..., Server], cohere: Path) -> Iterator[Server]:
    server = start(str(cohere), "--kv-cache-bytes", "64MiB").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture
def client(hosted: Server) -> OpenAI:
    return hosted.client()


@torch.inference_mode()
def greedy(directory: Path, prompt: str) -> str:
    """Return transformers' greedy continuation, without a cache."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = first = tokenizer(prompt)["input_ids"]
    for _ in range(TOKENS):
        ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    text: str = tokenizer.decode(ids[len(first) :])
    return text


def test_it_says_what_transformers_says(client: OpenAI, hosted: Server, cohere: Path) -> None:
    prompt = "The quick brown fox books a table for four on Friday, outside"
    answer = client.completions.create(
        model=hosted.model(), prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == greedy(cohere, prompt)


def test_it_follows_a_schema(client: OpenAI, hosted: Server) -> None:
    schema = {"type": "object", "properties": {"guests": {"enum": [1, 2, 3]}}, "required": ["guests"]}
    answer = client.chat.completions.create(
        model=hosted.model(),
        messages=[{"role": "user", "content": "How many?"}],
        max_tokens=200,
        temperature=1.0,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content or "")["guests"] in (1, 2, 3)
