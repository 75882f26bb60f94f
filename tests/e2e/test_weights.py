"""A model gets other weights while it is served, and keeps them when its scheduler dies; an administrator's routes."""

import base64
import gzip
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForCausalLM

from tests.e2e.administration import ADMIN_KEY, ordered, scheduler, wait_until_served
from tests.e2e.long_answer import long_answer
from tests.e2e.random_checkpoint import PLAIN, write
from tests.server_process import Server

TOKENS = 300
OPTIONS = ("--kv-cache-bytes", "16MiB", "--dtype", "float32", "--admin-key", ADMIN_KEY)
UPDATE = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen") / "tiny-qwen", PLAIN)


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write other weights of the same shapes, without a tokenizer."""
    directory = tmp_path_factory.mktemp("trained")
    torch.manual_seed(5)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(
        {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    shutil.copy(checkpoint / "config.json", directory)
    return directory


@pytest.fixture(scope="module")
def served(
    start: Callable[..., Server], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("state")
    server = start(str(checkpoint), *OPTIONS, "--scheduler.state-dir", str(state)).wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)
    assert not list(state.glob("weights/*")), "a stopped server leaves no weights behind"


@pytest.fixture
def client(served: Server) -> OpenAI:
    return served.client()


def update(server: Server, path: Path, *, rolling: bool = False) -> None:
    answer = ordered(server, UPDATE, model_path=str(path), rolling=rolling)
    assert answer.status_code == 200, answer.text
    assert len(set(answer.json()["weights"].values())) == 1


def test_new_weights_are_served_and_kept_through_deaths(
    served: Server, client: OpenAI, checkpoint: Path, trained: Path
) -> None:
    name = checkpoint.name
    old = long_answer(client, name, TOKENS)
    update(served, trained)
    new = long_answer(client, name, TOKENS)
    assert new != old
    before = scheduler(served)
    assert long_answer(client, name, TOKENS, 20, lambda: before.send_signal(signal.SIGKILL)) == new
    assert scheduler(served).pid != before.pid
    wait_until_served(served)
    assert [each.id for each in client.models.list()] == [name]
    update(served, checkpoint)
    assert long_answer(client, name, TOKENS) == old


def test_an_answer_that_has_begun_ends_with_the_weights_it_began_with(
    served: Server, client: OpenAI, checkpoint: Path, trained: Path
) -> None:
    name = checkpoint.name
    update(served, checkpoint)
    old = long_answer(client, name, TOKENS)
    updating = threading.Thread(target=update, args=(served, trained))
    assert long_answer(client, name, TOKENS, 20, updating.start) == old
    updating.join()
    assert long_answer(client, name, TOKENS) != old


def test_a_paused_answer_goes_on_with_the_new_weights(
    served: Server, client: OpenAI, checkpoint: Path, trained: Path
) -> None:
    name, tokens = checkpoint.name, 5 * TOKENS  # enough for the pause to come before the end
    update(served, checkpoint)
    old = long_answer(client, name, tokens)

    def swap() -> None:
        assert ordered(served, "/pause_generation").status_code == 200
        update(served, trained)
        assert ordered(served, "/continue_generation").status_code == 200

    mixed = long_answer(client, name, tokens, 20, swap)
    assert mixed not in (old, long_answer(client, name, tokens))
    assert mixed[:10] == old[:10]


def logprobs_of(path: Path, ids: list[int], first: int) -> list[float]:
    """Return transformers' log-probabilities of the tokens from `first` on, with the weights of a directory."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [scores[place - 1, ids[place]].item() for place in range(first, len(ids))]


def rollout(server: Server, ids: list[int], tokens: int, **more: object) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}
    answer = ordered(server, "/generate", input_ids=ids, return_logprob=True, sampling_params=sampling, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def scored(answer: dict[str, Any], side: str) -> tuple[list[int], list[float]]:
    triples = answer["meta_info"][f"{side}_token_logprobs"]
    return [each[1] for each in triples], [each[0] for each in triples]


def test_a_round_of_reinforcement_learning(served: Server, checkpoint: Path, trained: Path) -> None:
    """Rollouts, partial ones, new weights while memory is released, and continuations: token ids and scores."""
    update(served, checkpoint)
    prompt = list(range(20, 36))
    ids, scores = scored(rollout(served, prompt, 24), "output")
    assert len(ids) == 24
    assert scores == pytest.approx(logprobs_of(checkpoint, prompt + ids, len(prompt)), abs=2e-4)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(rollout, served, prompt, 5 * TOKENS, rid="partial")
        while not httpx.get(f"{served.url}/v1/loads").json()["loads"][0]["num_running_reqs"]:
            assert not running.done()
        assert ordered(served, "/abort_request", rid="partial").status_code == 200
        partial = running.result()
    assert partial["meta_info"]["finish_reason"]["type"] == "abort"
    begun, _ = scored(partial, "output")
    assert 0 < len(begun) < 5 * TOKENS
    assert begun[:24] == ids[: len(begun)], "the seed is the same"

    assert ordered(served, "/release_memory_occupation").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollout, served, prompt, 24)
        assert ordered(served, UPDATE, model_path=str(trained), weight_version="step-1").status_code == 200
        assert not waiting.done()
        assert ordered(served, "/resume_memory_occupation", tags=["kv_cache"]).status_code == 200
        late, scores = scored(waiting.result(), "output")
    assert scores == pytest.approx(logprobs_of(trained, prompt + late, len(prompt)), abs=2e-4)
    assert httpx.get(f"{served.url}/get_weight_version").json() == {"weight_version": "step-1"}

    longer = prompt + begun[:24]
    answer = rollout(served, longer, 24, logprob_start_len=0)
    new, scores = scored(answer, "output")
    assert scores == pytest.approx(logprobs_of(trained, longer + new, len(longer)), abs=2e-4)
    again, scores = scored(answer, "input")
    assert again == longer
    assert scores[1:] == pytest.approx(logprobs_of(trained, longer, 1), abs=2e-4)
    assert logprobs_of(checkpoint, longer, 1) != pytest.approx(logprobs_of(trained, longer, 1), abs=1e-2)


@pytest.mark.parametrize(
    "ends", [[signal.SIGTERM], pytest.param([signal.SIGKILL, signal.SIGTERM], marks=pytest.mark.slow)], ids=len
)
def test_tensors_of_a_trainer_survive_the_end_of_the_scheduler(
    served: Server, client: OpenAI, checkpoint: Path, trained: Path, ends: list[signal.Signals]
) -> None:
    """Two parts, of which a death keeps the first, and then other ends, which keep the weights."""
    name, prompt = checkpoint.name, list(range(20, 36))
    update(served, checkpoint)
    tensors = load_file(trained / "model.safetensors")
    names = sorted(tensors)
    parts = [{each: tensors[each] for each in names[half::2]} for half in (0, 1)]

    def send(part: dict[str, torch.Tensor], **more: object) -> None:
        coded = base64.b64encode(save(part)).decode()
        answer = ordered(served, "/update_weights_from_tensor", serialized_named_tensors=[coded], **more)
        assert answer.status_code == 200, answer.text

    send(parts[0], flush_cache=False)
    before = long_answer(client, name, TOKENS)
    assert long_answer(client, name, TOKENS, 20, lambda: scheduler(served).send_signal(signal.SIGKILL)) == before
    wait_until_served(served)
    send(parts[1], weight_version="step-2")
    row = ordered(served, "/get_weights_by_name", name="model.norm.weight", truncate_size=5).json()
    assert row == tensors["model.norm.weight"][:5].tolist()
    new = long_answer(client, name, TOKENS)
    assert new != before
    for end in ends:
        assert long_answer(client, name, TOKENS, 20, partial(scheduler(served).send_signal, end)) == new
        wait_until_served(served)
    assert long_answer(client, name, TOKENS) == new
    ids, scores = scored(rollout(served, prompt, 24), "output")
    assert scores == pytest.approx(logprobs_of(trained, prompt + ids, len(prompt)), abs=2e-4)
    assert httpx.get(f"{served.url}/get_weight_version").json() == {"weight_version": "step-2"}


def test_a_profile_has_the_steps_of_requests(served: Server) -> None:
    started = ordered(served, "/start_profile", num_steps=8, activities=["CPU"])
    assert started.status_code == 200, started.text
    rollout(served, list(range(20, 36)), 24)
    path = Path(started.json()["schedulers"]["scheduler-0"])
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == "step" and event["ph"] == "X" for event in events) == 8
    assert ordered(served, "/stop_profile").json()["schedulers"] == {"scheduler-0": str(path)}


def test_weights_of_another_model_are_refused(served: Server, client: OpenAI, checkpoint: Path, tmp_path: Path) -> None:
    before = long_answer(client, checkpoint.name, TOKENS)
    save_file({"some.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    for path, why in ((tmp_path / "none", "is no directory"), (tmp_path, "missing: ")):
        answer = ordered(served, UPDATE, model_path=str(path))
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
    assert long_answer(client, checkpoint.name, TOKENS) == before


@pytest.fixture(scope="module")
def pair(start: Callable[..., Server], checkpoint: Path) -> Iterator[Server]:
    server = start(str(checkpoint), *OPTIONS, "--dp-size", "2", "--threads", "1").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.mark.parametrize("updates", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_one_scheduler_after_the_other_is_updated_and_no_request_notices(
    pair: Server, checkpoint: Path, trained: Path, updates: int
) -> None:
    name, tokens = checkpoint.name, 60
    clients = [pair.client() for _ in range(4)]
    whole = {}
    for path in (trained, checkpoint):
        update(pair, path)
        whole[path] = long_answer(clients[0], name, tokens)
    over = threading.Event()
    texts: list[list[str]] = [[] for _ in clients]

    def ask(client: OpenAI, said: list[str]) -> None:
        while not over.is_set():
            said.append(long_answer(client, name, tokens))

    with ThreadPoolExecutor(len(clients)) as pool:
        asking = [pool.submit(ask, client, said) for client, said in zip(clients, texts, strict=True)]
        try:
            for number in range(updates):
                update(pair, (trained, checkpoint)[number % 2], rolling=True)
        finally:
            over.set()
        for each in asking:
            each.result()
    heard = [text for said in texts for text in said]
    assert heard
    assert set(heard) <= set(whole.values())
    print(f"{len(heard)} requests, {updates} updates of two schedulers, 0 failed")  # noqa: T201
