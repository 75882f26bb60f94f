"""A model with adapters, which clients name like models, loaded at the start and at run time, across deaths."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tercet.scheduler.testing.lora_checkpoints import write_adapter
from tests.e2e.administration import ADMIN_KEY, ordered, scheduler, wait_until_served
from tests.e2e.long_answer import long_answer
from tests.e2e.random_checkpoint import PLAIN, write
from tests.server_process import Server

TOKENS = 300
OPTIONS = ("--kv-cache-bytes", "16MiB", "--dtype", "float32", "--admin-key", ADMIN_KEY)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen") / "tiny-qwen", PLAIN)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    seeds = {"sql": 0, "poems": 1}
    return {name: write_adapter(root / name, checkpoint, seed=seed, size=0.3) for name, seed in seeds.items()}


@pytest.fixture(scope="module")
def served(
    start: Callable[..., Server], checkpoint: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store") / "responses.sqlite"
    server = start(str(checkpoint), *OPTIONS, "--lora", f"sql={adapters['sql']}", "--response-store", str(store)).wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture
def client(served: Server) -> OpenAI:
    return served.client()


def test_an_adapter_is_named_as_a_model_is(served: Server, client: OpenAI, checkpoint: Path) -> None:
    base = checkpoint.name
    listed = {each.id: each for each in client.models.list()}
    assert set(listed) == {base, "sql"}
    assert listed["sql"].model_extra is not None
    assert listed["sql"].model_extra["parent"] == base
    plain, adapted = long_answer(client, base, TOKENS), long_answer(client, "sql", TOKENS)
    assert plain != adapted == long_answer(client, "sql", TOKENS)
    assert long_answer(client, base, TOKENS) == plain


def test_a_request_with_an_adapter_outlives_its_scheduler(served: Server, client: OpenAI) -> None:
    whole = long_answer(client, "sql", TOKENS)
    before = scheduler(served)
    assert long_answer(client, "sql", TOKENS, 20, lambda: before.send_signal(signal.SIGKILL)) == whole
    assert scheduler(served).pid != before.pid


def test_an_adapter_loaded_at_run_time_survives_deaths_of_parts(
    served: Server, client: OpenAI, adapters: dict[str, Path]
) -> None:
    with pytest.raises(NotFoundError):
        long_answer(client, "poems", TOKENS)
    answer = ordered(served, "/v1/load_lora_adapter", lora_name="poems", lora_path=str(adapters["poems"]))
    assert answer.status_code == 200, answer.text
    assert answer.json()["loaded_adapters"]["poems"] == str(adapters["poems"])
    whole = long_answer(client, "poems", TOKENS)
    assert whole != long_answer(client, "sql", TOKENS)
    for part in psutil.Process(served.process.pid).children():
        if "tercet.frontend" in part.cmdline() or "tercet.scheduler" in part.cmdline():
            part.kill()
    wait_until_served(served)
    assert long_answer(served.client(), "poems", TOKENS) == whole
    assert ordered(served, "/v1/unload_lora_adapter", lora_name="poems").status_code == 200
    with pytest.raises(NotFoundError):
        long_answer(served.client(), "poems", TOKENS)


def test_what_is_no_adapter_of_the_model_is_refused(served: Server, checkpoint: Path, tmp_path: Path) -> None:
    answer = ordered(served, "/v1/load_lora_adapter", lora_name="none", lora_path=str(tmp_path))
    assert answer.status_code == 400
    assert "adapter_config.json" in answer.json()["error"]["message"]
    answer = ordered(served, "/v1/load_lora_adapter", lora_name=checkpoint.name, lora_path=str(tmp_path))
    assert answer.status_code == 400


def test_vectors_have_no_adapters(client: OpenAI) -> None:
    with pytest.raises((BadRequestError, NotFoundError)):
        client.embeddings.create(model="sql", input="some text")
