"""HTTP to the model and back, through real clients."""

import json
import subprocess
from collections.abc import Callable

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from tests.server_process import Server

QUESTION: ChatCompletionUserMessageParam = {"role": "user", "content": "What is a tercet?"}


def test_a_chat_is_answered(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=[QUESTION], temperature=0, max_tokens=60)
    choice = answer.choices[0]
    assert choice.finish_reason in {"stop", "length"}
    assert "three" in (choice.message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text_in_pieces(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=[QUESTION], temperature=0, max_tokens=200)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[QUESTION],
            temperature=0,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 2
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_curl_streams_too(either: Server) -> None:
    body = json.dumps({"model": either.model(), "messages": [QUESTION], "stream": True, "max_tokens": 8})
    run = subprocess.run(
        ["curl", "-sN", f"{either.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    events = [line for line in run.stdout.splitlines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"


def test_equal_seeds_give_equal_text_and_other_seeds_other_text(client: OpenAI, model: str) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(model=model, prompt="Once", max_tokens=24, temperature=1.5, seed=seed)
        return answer.choices[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_a_second_request_finds_its_prompt_cached(client: OpenAI, model: str) -> None:
    messages: list[ChatCompletionUserMessageParam] = [
        {"role": "user", "content": "Tell me of pages, slots, plans and policies. " * 8}
    ]
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[1] > cached[0]


def test_a_ready_server_shows_a_request_that_works(server: Server, model: str) -> None:
    """The fixture asserts that it ends with 0."""
    [shown] = [line for line in server.lines if line.startswith("curl ")]
    answer = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(answer)["model"] == model


def test_a_model_that_is_nowhere_ends_the_start_with_one_line(start: Callable[..., Server]) -> None:
    server = start("/no/such/model")
    assert server.wait_for_end(60) == 2
    errors = [line for line in server.lines if "/no/such/model" in line and "error" in line]
    assert len(errors) == 1
