"""Answers match the requested constraint, for any model, through the whole server."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openai import OpenAI

from tests.server_process import Server

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
        "friend": {"anyOf": [{"$ref": "#/$defs/pet"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "friend"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "born": {"type": "string", "format": "date"}},
            "required": ["kind", "born"],
            "additionalProperties": False,
        }
    },
}
PROMPT = "Write down who you are."
SUM = 'root ::= num ("+" num){1,3}\nnum ::= [1-9] [0-9]{0,2}'
BALANCED = 'root ::= "(" root? ")" | "x"'


def complete(client: OpenAI, model: str, asked: dict[str, Any], **options: Any) -> Any:
    chosen = {"prompt": PROMPT, "max_tokens": 120, "temperature": 1.0, **options}
    return client.completions.create(model=model, extra_body=asked, **chosen)


def lenient(client: OpenAI) -> OpenAI:
    """Return a client that accepts completion chunks without finish_reason, which its types do not know."""
    return OpenAI(base_url=client.base_url, api_key="any", max_retries=0, timeout=60)


def assert_instance(choice: Any, schema: dict[str, Any]) -> bool:
    """Assert that a finished choice is an instance, and return whether it is finished."""
    if choice.finish_reason == "length":
        return False
    assert choice.finish_reason == "stop"
    Draft202012Validator(schema).validate(json.loads(choice.text))
    return True


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_strict_schema_is_kept_to_by_every_choice(client: OpenAI, model: str, temperature: float) -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}}
    answer = complete(client, model, asked, n=3, temperature=temperature, seed=3, max_tokens=200)
    assert sum(assert_instance(choice, PERSON) for choice in answer.choices) >= 1


def test_a_json_object_is_one_or_cut_short(client: OpenAI, model: str) -> None:
    answer = complete(client, model, {"response_format": {"type": "json_object"}}, n=2, max_tokens=60)
    for choice in answer.choices:
        assert choice.text.startswith("{")
        assert_instance(choice, {"type": "object"})
    [cut] = complete(client, model, {"guided_json": PERSON}, max_tokens=4).choices
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "peut-être"]}}, "yes|no|peut-être"),
        ({"ebnf": SUM}, r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}"),
        ({"structured_outputs": {"grammar": BALANCED}}, r"\(*x?\)*"),
    ],
)
def test_texts_match_streamed_or_not(client: OpenAI, model: str, asked: dict[str, Any], pattern: str) -> None:
    whole = complete(client, model, asked, n=3, seed=5)
    for choice in whole.choices:
        assert choice.finish_reason == "length" or re.fullmatch(pattern, choice.text)
    texts = {choice.index: "" for choice in whole.choices}
    for chunk in lenient(client).completions.create(
        model=model, prompt=PROMPT, max_tokens=120, temperature=1.0, n=3, seed=5, stream=True, extra_body=asked
    ):
        for piece in chunk.choices:
            texts[piece.index] += piece.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_constrained_and_free_requests_run_side_by_side(client: OpenAI, model: str) -> None:
    def ask(number: int) -> Any:
        asked = {"regex": f"{number}[ab]{{8}}"} if number % 2 else {}
        return complete(client, model, asked, prompt="Once upon", seed=number, max_tokens=16).choices[0]

    alone = ask(2).text
    with ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(ask, range(8)))
    for number, choice in enumerate(choices):
        if number % 2:
            assert re.fullmatch(f"{number}[ab]{{8}}", choice.text)
    assert choices[2].text == alone


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(?<=a)b"}, "look"),
        ({"ebnf": "root ::= missing"}, "missing"),
    ],
)
def test_nonsense_is_refused_by_name(client: OpenAI, model: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, model, asked)
    assert words in str(error.value.body)


def test_a_bomb_is_refused_while_others_are_served(client: OpenAI, model: str) -> None:
    bomb = {"type": "integer", "multipleOf": 99999999}
    waits = []
    with ThreadPoolExecutor(1) as pool:
        sent = time.monotonic()
        refused = pool.submit(complete, client, model, {"guided_json": bomb})
        while not refused.done():
            began = time.monotonic()
            assert complete(client, model, {}, max_tokens=2).choices
            waits.append(time.monotonic() - began)
        took = time.monotonic() - sent
        with pytest.raises(openai.BadRequestError, match="too long"):
            refused.result()
    assert sorted(waits)[len(waits) // 2] < took / 2
    [choice] = complete(client, model, {"regex": "ok"}).choices
    assert choice.text == "ok"


@pytest.mark.slow
def test_a_killed_scheduler_costs_an_instance_nothing(start: Callable[..., Server]) -> None:
    """The grammar is replayed over the earlier output, and continues from there.

    In an ordinary run, `tests/chaos/test_chats.py` kills a scheduler of chats with grammars.
    """
    server = start("embedded", "--dtype", "float32", "--kv-cache-bytes", "64MiB").wait()
    client = server.client()
    asked: dict[str, Any] = {
        "model": "embedded",
        "prompt": PROMPT,
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 7,
        "extra_body": {"regex": "([a-z]{3}[0-9]{2} ){30}"},
    }
    whole = client.completions.create(**asked).choices[0].text
    [scheduler] = (
        each for each in psutil.Process(server.process.pid).children() if "tercet.scheduler" in each.cmdline()
    )
    text = ""
    for count, chunk in enumerate(lenient(client).completions.create(**asked, stream=True)):
        text += chunk.choices[0].text
        if count == 10:
            os.kill(scheduler.pid, signal.SIGKILL)
    assert text == whole
    assert re.fullmatch("([a-z]{3}[0-9]{2} ){30}", text)
    info = server.get("/server_info")
    assert (info["deaths"], info["requests_resumed_and_finished"]) == ({"scheduler": 1}, 1)
    assert server.stop() == 0
