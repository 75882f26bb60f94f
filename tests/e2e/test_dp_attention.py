"""A mixture whose two processes have requests of their own, served like any other model, also when one of them dies."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.administration import ADMIN_KEY, ordered
from tests.e2e.long_answer import long_answer
from tests.e2e.random_checkpoint import PLAIN, write
from tests.e2e.test_tensor_parallel import lives, ranks
from tests.server_process import Server

TOKENS = 150
OPTIONS = ("--kv-cache-bytes", "16MiB", "--dtype", "float32", "--admin-key", ADMIN_KEY, "--threads", "1")
SPLIT = ("--tp", "2", "--dp-size", "2", "--enable-dp-attention")
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": []}
PROMPTS = [f"{word}, said the fox" for word in ("One", "Two", "Three", "Four", "Five", "Six")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen") / "tiny-mixture", PLAIN, "Qwen3Moe", **EXPERTS)


@pytest.fixture(scope="module")
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write other weights of the same shapes."""
    directory = tmp_path_factory.mktemp("trained")
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: 1.1 * tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    shutil.copy(checkpoint / "config.json", directory)
    assert len({tensor.dtype for tensor in tensors.values()}) == 1
    assert next(iter(tensors.values())).dtype == torch.float32
    return directory


def answers(server: Server) -> list[str]:
    """Return greedy answers to all prompts at once, two of them each."""
    client, model = server.client(), server.model()

    def ask(prompt: str) -> list[str]:
        answer = client.completions.create(
            model=model, prompt=prompt, n=2, max_tokens=40, temperature=0.0, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in answer.choices]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [text for texts in pool.map(ask, PROMPTS) for text in texts]


def answers_after(server: Server, weights: Path) -> list[str]:
    """Return the answers after an update of the weights."""
    answer = ordered(server, "/update_weights_from_disk", model_path=str(weights))
    assert answer.status_code == 200, "\n".join([answer.text, *server.lines])
    return answers(server)


@pytest.fixture(scope="module")
def expected(start: Callable[..., Server], checkpoint: Path, trained: Path) -> list[list[str]]:
    """Return the answers of one process, with both weights."""
    alone = start(str(checkpoint), *OPTIONS).wait()
    texts = [answers(alone), answers_after(alone, trained)]
    assert alone.stop() == 0
    return texts


@pytest.fixture(scope="module")
def shared(
    start: Callable[..., Server],
    checkpoint: Path,
    expected: list[list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    events = tmp_path_factory.mktemp("e") / "kv"
    told = json.dumps({"enable_kv_cache_events": True, "endpoint": f"ipc://{events}"})
    server = start(str(checkpoint), *OPTIONS, *SPLIT, "--kv-events-config", told).wait()
    assert events.is_socket()
    assert events.with_name("kv_dp1").is_socket()
    yield server
    processes = ranks(server)
    assert server.stop() == 0, "\n".join(server.lines)
    assert not any(map(lives, processes))


def test_answers_are_those_of_one_process(
    shared: Server, checkpoint: Path, trained: Path, expected: list[list[str]]
) -> None:
    """They also are with other weights, and with the first ones again."""
    plain, after = expected
    assert len({*plain}) == len({*after}) == len(PROMPTS)
    assert plain != after
    assert answers(shared) == plain
    assert answers_after(shared, trained) == after
    assert answers_after(shared, checkpoint) == plain


def test_a_request_outlives_a_rank(shared: Server) -> None:
    client, model = shared.client(), shared.model()
    whole = long_answer(client, model, TOKENS)
    before = ranks(shared)
    assert len(before) == 2
    assert long_answer(client, model, TOKENS, 20, before[1].kill) == whole
    assert not any(map(lives, before))
    words = r"rank 1 of this model ended.*: killed by SIGKILL"
    assert any(re.search(words, line) for line in shared.lines), "\n".join(shared.lines)
