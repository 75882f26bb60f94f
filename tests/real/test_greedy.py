"""Greedy text and perplexity of a real model, compared with llama.cpp and transformers on the same file."""

import json
import math
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.frontend.engine import Engine
from tests.real.goldens import MARGINS, TOKENS, Golden, digest
from tests.real.prompts import LONG, PROMPTS, SHORT, Prompt
from tests.server_process import Server

PAGE = Path(__file__).parent / "page.txt"
LIVE = ("capital", "german", "sql", "json", "turns")
"""Prompts that transformers also answers while the test runs, and that keep their answers when both sides round."""
LIVE_TOKENS = 8
SHORT_OR_LONG = pytest.mark.parametrize(
    "some", [SHORT, pytest.param([LONG], marks=pytest.mark.slow)], ids=["short", "long"]
)
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS}


def post(server: Server, path: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON answer to a request."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    with urllib.request.urlopen(request, timeout=200) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def prompts(server: Server, gguf_model: Path) -> dict[str, list[int]]:
    """Return the tokens of every prompt, and of the page, by name."""
    chats = (gguf_model / "chat_template.jinja").exists()
    bodies: dict[str, dict[str, Any]] = {
        each.name: {"messages": each.chat()} if chats and each.messages else {"prompt": each.plain} for each in PROMPTS
    }
    bodies["page"] = {"prompt": PAGE.read_text(encoding="utf-8")}
    return {name: post(server, "/tokenize", body)["tokens"] for name, body in bodies.items()}


def check(some: Sequence[Prompt], answers: Sequence[Any], goldens: Mapping[str, Golden], record: Any) -> None:
    """Assert that answers equal the goldens up to their near ties, and record how many are equal as a whole."""
    found = {each.name: answer["output_ids"] for each, answer in zip(some, answers, strict=True)}
    for peer in MARGINS:
        faults = {name: goldens[name].fault(peer, tokens) for name, tokens in found.items()}
        assert not any(faults.values()), {name: fault for name, fault in faults.items() if fault}
        whole = sum(goldens[name].tokens(peer) == tokens for name, tokens in found.items())
        record("figures", f"{whole} of {len(found)} answers equal those of {peer}")


def test_prompts_are_tokenized_as_by_llama_cpp(prompts: dict[str, list[int]], goldens: dict[str, Golden]) -> None:
    assert {name: digest(ids) for name, ids in prompts.items()} == {name: each.prompt for name, each in goldens.items()}


@SHORT_OR_LONG
def test_answers_from_gguf(
    server: Server, prompts: dict[str, list[int]], goldens: dict[str, Golden], record_property: Any, some: list[Prompt]
) -> None:
    ids = [prompts[each.name] for each in some]
    answers = post(server, "/generate", {"input_ids": ids, "sampling_params": GREEDY})
    check(some, answers, goldens, record_property)


def test_perplexity_equals_that_of_llama_cpp(
    server: Server, prompts: dict[str, list[int]], goldens: dict[str, Golden], record_property: Any
) -> None:
    body = {"input_ids": prompts["page"], "return_logprob": True, "logprob_start_len": 0}
    answer = post(server, "/generate", {**body, "sampling_params": {"max_new_tokens": 1}})
    logprobs = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    found, expected = math.exp(-math.fsum(logprobs) / len(logprobs)), goldens["page"].perplexity
    record_property("figures", f"perplexity {found:.4f}, others {expected}")
    assert found == pytest.approx(expected["llama.cpp"], rel=0.005)
    assert found == pytest.approx(expected["transformers"], rel=1e-4)


@SHORT_OR_LONG
def test_answers_from_safetensors(
    checkpoint: Path,
    prompts: dict[str, list[int]],
    goldens: dict[str, Golden],
    record_property: Any,
    some: list[Prompt],
) -> None:
    ids = [prompts[each.name] for each in some]
    with Engine(checkpoint, dtype="float32", kv_cache_bytes="512MiB") as engine:
        check(some, engine.generate(input_ids=ids, sampling_params=GREEDY), goldens, record_property)


@pytest.mark.parametrize(
    "some",
    [[each for each in SHORT if each.name in LIVE], pytest.param([LONG], marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_answers_with_rounded_activations(
    gguf_model: Path, prompts: dict[str, list[int]], goldens: dict[str, Golden], some: list[Prompt]
) -> None:
    """Without options, activations have 8 bits, as in llama.cpp; both round, so that others of the prompts may differ.

    A server with float32 takes three times as long for the long one.
    """
    ids = [prompts[each.name] for each in some]
    with Engine(gguf_model, kv_cache_bytes="256MiB") as engine:
        answers = engine.generate(input_ids=ids, sampling_params=GREEDY)
    found = {each.name: answer["output_ids"] for each, answer in zip(some, answers, strict=True)}
    faults = {name: goldens[name].fault("llama.cpp", tokens) for name, tokens in found.items()}
    assert not any(faults.values()), faults


def test_transformers_answers_as_its_goldens(
    checkpoint: Path, prompts: dict[str, list[int]], goldens: dict[str, Golden]
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name in LIVE:
        ids = torch.tensor([prompts[name]])
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIVE_TOKENS, do_sample=False
            )
        tokens = found[0, ids.shape[1] :].tolist()
        assert tokens == goldens[name].tokens("transformers")[:LIVE_TOKENS], name
