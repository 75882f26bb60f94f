"""Clients that send one request after the other until standard input ends, with a line of JSON for every answer.

Usage: python tests/steady_traffic.py URL CLIENTS
"""

import json
import sys
import threading
import time

from openai import OpenAI, OpenAIError

_PROMPTS = ["The parts of a server", "A request that", "When one of them", "Once upon a time"]
_TOKENS = 40
_PAUSE = 0.1
"""Seconds in which the machine is free for the parts that a test starts or restarts."""


def ask(client: OpenAI, model: str, prompt: str) -> str:
    """Return the greedy continuation of a prompt, streamed."""
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=_TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    return "".join(chunk.text for chunk in chunks)


def keep_asking(client: OpenAI, model: str, number: int, stop: threading.Event) -> None:
    """Send the next request soon after the last one has ended."""
    prompt = _PROMPTS[number % len(_PROMPTS)]
    while not stop.is_set():
        began = time.monotonic()
        text = error = ""
        try:
            text = ask(client, model, prompt)
        except (OpenAIError, OSError, AssertionError) as failure:
            error = repr(failure)
            time.sleep(0.1)
        line = {
            "client": number,
            "began": began,
            "ended": time.monotonic(),
            "prompt": prompt,
            "text": text,
            "error": error,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        stop.wait(_PAUSE)


def main(url: str, clients: int) -> None:
    """Run all clients."""
    client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    stop = threading.Event()
    threads = [threading.Thread(target=keep_asking, args=(client, model, number, stop)) for number in range(clients)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
