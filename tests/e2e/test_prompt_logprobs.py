"""Log-probabilities of a prompt, compared with transformers on the same weights."""

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.random_checkpoint import PLAIN, SENTENCES, write
from tests.server_process import Server

TOP = 3
CHAT: list[Any] = [{"role": "user", "content": SENTENCES[0]}]
Told = list[dict[str, dict[str, Any]] | None]


def check(told: Told, ids: list[int], directory: Path) -> None:
    """Assert that every entry is the log-softmax of transformers' logits at its position."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert told[0] is None
    assert len(told) == len(ids)
    for token_id, given, entry in zip(ids[1:], scores, told[1:], strict=False):
        assert entry is not None
        best = given.topk(TOP)
        assert set(entry) == {str(token_id), *map(str, best.indices.tolist())}
        for each, fields in entry.items():
            assert fields["logprob"] == pytest.approx(given[int(each)].item(), abs=1e-3)
        ranks = [entry[str(each)]["rank"] for each in best.indices.tolist()]
        assert ranks == list(range(1, TOP + 1))


def test_they_are_those_of_transformers(random_server: Server, tmp_path: Path) -> None:
    directory = write(tmp_path, PLAIN)
    client: OpenAI = random_server.client()
    asked: dict[str, Any] = {"model": random_server.model(), "max_tokens": 1, "extra_body": {"prompt_logprobs": TOP}}
    chat = client.chat.completions.create(messages=CHAT, **asked)
    completion = client.completions.create(prompt=SENTENCES[1], **asked)
    tokenize = f"{random_server.url}/tokenize"
    assert chat.model_extra is not None
    assert completion.choices[0].model_extra is not None
    post = client._client.post
    check(chat.model_extra["prompt_logprobs"], post(tokenize, json={"messages": CHAT}).json()["tokens"], directory)
    ids = post(tokenize, json={"prompt": SENTENCES[1]}).json()["tokens"]
    check(completion.choices[0].model_extra["prompt_logprobs"], ids, directory)
