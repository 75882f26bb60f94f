"""A predicted answer takes fewer steps, and is the same answer."""

import time

import httpx2
import pytest
from openai import OpenAI
from openai.types import CompletionUsage

from tests.server_process import Server

QUESTION = "Which options does tercet serve have for the KV cache?"


def counted(server: Server, name: str) -> int:
    """Return a counter of the only scheduler."""
    [line] = [line for line in httpx2.get(f"{server.url}/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return int(float(line.split()[-1]))


def asked(client: OpenAI, model: str, salt: str, prediction: str | None = None) -> tuple[str, CompletionUsage]:
    """Return (answer, counts) for a new tenant, so that no cache has the answer."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0.7,
        seed=3,
        max_completion_tokens=60,
        prediction={"type": "content", "content": prediction} if prediction else None,
        extra_body={"cache_salt": salt, "ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage


@pytest.mark.parametrize("wrong", [False, True])
def test_a_prediction_changes_nothing_but_the_steps(server: Server, client: OpenAI, model: str, wrong: bool) -> None:
    text, usage = asked(client, model, f"nobody {wrong}")
    prediction = text[::-1] if wrong else text
    before = counted(server, "tercet_accepted_tokens_total")
    again, told = asked(client, model, f"somebody {wrong}", prediction)
    assert again == text
    assert told.completion_tokens == usage.completion_tokens == 60
    details = told.completion_tokens_details
    assert details is not None
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None
    assert rejected is not None
    if wrong:
        assert accepted < 10 < rejected
    else:
        assert accepted > 50
        deadline = time.monotonic() + 10
        while counted(server, "tercet_accepted_tokens_total") - before <= 30:  # reported by the next heartbeat
            assert time.monotonic() < deadline
            time.sleep(0.05)
