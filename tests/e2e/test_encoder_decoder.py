"""A BART over HTTP: the texts of transformers' greedy `generate`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from openai import BadRequestError, OpenAI

from packages.scheduler.tests.models.encoder_decoder.checkpoint import BEGIN, END, write_bart
from packages.scheduler.tests.models.encoder_decoder.runs import ANSWER, Reference
from tests.server_process import Server

TEXTS = ["One", "A storm is expected.", "Nearly 800 thousand customers were scheduled to be affected. " * 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bart(tmp_path_factory.mktemp("encoder") / "reading")


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], directory: Path) -> Iterator[Server]:
    server = start(str(directory), "--dtype", "float32", "--kv-cache-bytes", "16MiB").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def expected(directory: Path, tokenizer: Any) -> list[str]:
    reference = Reference(directory)
    answers = [reference.answer(tokenizer(text).input_ids, [END, BEGIN]) for text in TEXTS]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]


def test_completions_are_those_of_transformers(client: OpenAI, tokenizer: Any, expected: list[str]) -> None:
    more: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0, "extra_body": {"ignore_eos": True}}
    ids = [list(tokenizer(text).input_ids) for text in TEXTS]
    prompts: list[Any] = [TEXTS, ids]
    for prompt in prompts:
        answer = client.completions.create(model="reading", prompt=prompt, **more)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == len(TEXTS) * ANSWER
    stream = client.completions.create(model="reading", prompt=TEXTS[1], stream=True, **more)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[1]


def test_the_native_route_answers(server: Server, expected: list[str]) -> None:
    sampling = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "n": 2}
    answer = httpx.post(f"{server.url}/generate", json={"text": TEXTS[2], "sampling_params": sampling}, timeout=60)
    assert [each["text"] for each in answer.json()] == [expected[2]] * 2


def test_what_does_not_fit_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="maximum prompt length is 192"):
        client.completions.create(model="reading", prompt="x" * 191)
    with pytest.raises(BadRequestError, match="The encoder of this model reads the prompt"):
        client.completions.create(model="reading", prompt="x", echo=True)
    with pytest.raises(BadRequestError, match="no chat template"):
        client.chat.completions.create(model="reading", messages=[{"role": "user", "content": "x"}])
