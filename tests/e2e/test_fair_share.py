"""Two API keys on a whole server, one of which sends many requests at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.e2e.administration import ADMIN_KEY, ordered
from tests.server_process import Server

FLOOD = 24


@pytest.mark.parametrize("policy", ["fair", pytest.param("fcfs", marks=pytest.mark.slow)])
def test_a_chat_does_not_wait_behind_all_that_another_key_has_asked_for(
    start: Callable[..., Server], policy: str
) -> None:
    """Policy `fair`; `fcfs` is the counterexample."""
    keys = {"TERCET_API_KEYS": "many\none", "TERCET_ADMIN_KEYS": ADMIN_KEY}
    options = ["--schedule-policy", policy, "--max-running-requests", "2", "--kv-cache-bytes", "64MiB"]
    server = start("embedded", *options, env=keys, key=ADMIN_KEY).wait()
    model, ended = server.model(), list[str]()

    def ask(key: str, prompt: str, max_tokens: int) -> None:
        client = OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)
        more = {"ignore_eos": True}
        client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, extra_body=more)
        ended.append(key)

    assert ordered(server, "/pause_generation").status_code == 200  # so that all of them wait before any is served
    with ThreadPoolExecutor(FLOOD + 1) as pool:
        flood = [pool.submit(ask, "many", f"Tell me of {number}", 16) for number in range(FLOOD)]
        server.wait_for(lambda load: load["queued"] == FLOOD, 30)
        chat = pool.submit(ask, "one", "What is a scheduler?", 8)
        server.wait_for(lambda load: load["queued"] == FLOOD + 1, 30)
        assert ordered(server, "/continue_generation").status_code == 200
        for each in (chat, *flood):
            each.result()
    place = ended.index("one")
    assert place < FLOOD // 4 if policy == "fair" else place > FLOOD - FLOOD // 4
    assert server.stop() == 0, "\n".join(server.lines)
