"""Requests with adapters through core, executor and models together, against PEFT's `generate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from packages.scheduler.tests.generation.test_generation import PROMPTS, TOKENS
from tercet.kernels.native.library import missing_library
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import AdapterPending, AdapterRead
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Split
from tercet.scheduler.models.registry import load_config
from tercet.scheduler.testing import Driver, request
from tercet.scheduler.testing.lora_checkpoints import write_adapter

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

Reference = Callable[..., Any]
NAMES = ("first", "second", "third")


@pytest.fixture(scope="module")
def base(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, base, rank=4 + seed, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def expected(base: Path, adapters: dict[str, Path], reference: Reference) -> Callable[[str, str], list[int]]:
    """The greedy answer to a prompt, by the name of an adapter or "plain"."""
    known: dict[tuple[str, str], list[int]] = {}

    def generate(name: str, prompt: str) -> list[int]:
        if (name, prompt) not in known:
            model = reference(base)
            model.generation_config.eos_token_id = None
            if name != "plain":
                model = peft.PeftModel.from_pretrained(model, adapters[name])
            ids = torch.tensor([PROMPTS[prompt]])
            mask = torch.ones_like(ids)
            made = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
            )
            known[name, prompt] = made[0, ids.shape[1] :].tolist()
        return known[name, prompt]

    return generate


class Server(Driver):
    """Reads adapters when they are asked for, as the loop has it done."""

    def __init__(
        self,
        base: Path,
        *,
        backend: str,
        overlap: int = 0,
        split: Split = Split(),
        loras: int = 2,
        draft_rows: int = 0,
        **more: Any,
    ) -> None:
        shape = load_config(base)
        page = 2 * 8 * shape.kv_heads * shape.head_dim * 4 * shape.layers
        options = WorkerOptions(
            model=base,
            device="cpu",
            page_size=8,
            slots=4,
            kv_cache_bytes=200 * page,
            attention_backend=backend,
            overlap=overlap > 0 or split.stages > 1,
            max_loras=loras,
            max_lora_rank=8,
            draft_rows=draft_rows,
            **more,
        )
        self.worker = TpModelWorker(options) if split.ranks == 1 else Ranks(options, split)
        config = CoreConfig(token_budget=23, draft_rows=draft_rows, stages=split.stages)
        overlap = split.stages if split.stages > 1 else overlap
        super().__init__(self.worker.capacity, config, overlap=overlap, executor=self.worker)

    def ask(self, rid: str, prompt: str, path: Path | None, **more: Any) -> None:
        lora = None
        if path is not None:
            desk = self.worker.adapters
            assert desk is not None
            desk.request(LoRAAdapter(str(path)))
            lora = LoRAAdapter(str(path), desk.get(LoRAAdapter(str(path))).result().sha256)
        wanted = request(
            rid,
            PROMPTS[prompt],
            lora=lora,
            **{"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **more},
        )
        self.send(wanted)

    def close(self) -> None:
        self.worker.close()
        self.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("backend", ["torch_native", "cpu"])
def test_adapters_side_by_side_and_more_than_there_are_places(
    backend: str,
    overlap: int,
    base: Path,
    adapters: dict[str, Path],
    expected: Callable[[str, str], list[int]],
) -> None:
    if backend == "cpu" and missing_library():
        pytest.skip(missing_library())
    server = Server(base, backend=backend, overlap=overlap)
    asked = [("first", "short"), ("plain", "long"), ("second", "branch"), ("third", "long"), ("first", "long")]
    for name, prompt in asked:
        server.ask(f"{name} {prompt}", prompt, adapters.get(name))
        server.step()
    server.run()
    for name, prompt in asked:
        assert server.output[f"{name} {prompt}", 0] == expected(name, prompt), (name, prompt)
    assert sum(len(plan.adapters) for plan in server.plans) >= 3
    server.close()


@pytest.mark.parametrize(("backend", "size"), [("torch_native", 1), ("cpu", 1), ("auto", 2)])
def test_tokens_with_adapters_are_guessed(
    backend: str, size: int, base: Path, adapters: dict[str, Path], expected: Callable[[str, str], list[int]]
) -> None:
    """In one process, and in two that share the model: each assumes what it is told to."""
    if backend == "cpu" and missing_library():
        pytest.skip(missing_library())
    server = Server(base, backend=backend, split=Split(size), draft_rows=12)
    asked = [("first", "short"), ("plain", "short"), ("second", "branch")]
    for name, prompt in asked:
        told = [token if place % 6 else 3 for place, token in enumerate(expected(name, prompt), start=1)]
        server.ask(name, prompt, adapters.get(name), prediction=told)
    server.run()
    for name, prompt in asked:
        assert server.output[name, 0] == expected(name, prompt)
    assert server.core.counters.accepted_tokens > TOKENS
    server.close()


def test_a_model_with_recurrent_state_runs_adapters(
    checkpoints: Callable[[str], Path], reference: Reference, tmp_path: Path
) -> None:
    """Guessed tokens and snapshots of the prefix cache included."""
    base = checkpoints("lfm2")
    layers = r".*layers\.\d+\.(conv\.(in|out)_proj|self_attn\.\w+_proj|feed_forward\.w\d)"
    adapter = write_adapter(tmp_path, base, modules=layers)
    answers = {}
    for name, model in (
        ("plain", reference(base)),
        ("adapted", peft.PeftModel.from_pretrained(reference(base), adapter)),
    ):
        model.generation_config.eos_token_id = None
        ids = torch.tensor([PROMPTS["branch"]])
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        answers[name] = made[0, ids.shape[1] :].tolist()
    assert answers["plain"] != answers["adapted"]
    server = Server(base, backend="auto", draft_rows=8)
    for turn in range(2):
        for name, path in (("adapted", adapter), ("plain", None)):
            told = [token if place % 7 else 3 for place, token in enumerate(answers[name], start=1)]
            server.ask(f"{name} {turn}", "branch", path, max_new_tokens=40, prediction=told)
        server.run()
        assert {name: server.output[f"{name} {turn}", 0] for name in answers} == answers
    counters = server.core.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.cached_tokens == 2 * 104
    server.close()


def test_prefixes_are_found_again_with_the_same_adapter_alone(
    base: Path, adapters: dict[str, Path], expected: Callable[[str, str], list[int]]
) -> None:
    server = Server(base, backend="torch_native")
    for rid, name in (("a", "first"), ("b", "second"), ("c", "plain"), ("d", "first")):
        before = server.core.counters.cached_tokens
        server.ask(rid, "long", adapters.get(name))
        server.run()
        assert server.output[rid, 0] == expected(name, "long")
        assert (server.core.counters.cached_tokens > before) == (rid == "d")
    server.close()


@pytest.mark.parametrize("split", [Split(2), Split(1, 2), pytest.param(Split(2, 2), marks=pytest.mark.slow)], ids=str)
def test_processes_share_a_model_with_adapters(
    split: Split, base: Path, adapters: dict[str, Path], expected: Callable[[str, str], list[int]]
) -> None:
    server = Server(base, backend="auto", split=split)
    asked = [("first", "short"), ("plain", "short"), ("second", "branch"), ("third", "long")]
    for name, prompt in asked:
        server.ask(name, prompt, adapters.get(name))
    server.run()
    for name, prompt in asked:
        assert server.output[name, 0] == expected(name, prompt)
    server.close()


def test_an_adapter_is_read_before_it_is_planned(base: Path, adapters: dict[str, Path]) -> None:
    server = Server(base, backend="torch_native")
    desk = server.worker.adapters
    assert desk is not None
    unread = LoRAAdapter(str(adapters["first"]))
    assert not desk.request(unread)
    while not desk.pop_loaded():
        pass
    lora = LoRAAdapter(unread.path, desk.get(unread).result().sha256)
    server.send(request("a", PROMPTS["short"], lora=lora), AdapterPending(lora))
    assert server.core.schedule() is None
    server.send(AdapterRead(lora, desk.error_of(lora), desk.get(lora).result().sha256))
    server.run()
    assert ("a", 0) in server.finishes
    server.close()


def test_a_model_of_transformers_own_runs_no_adapters(tmp_path: Path) -> None:
    import transformers

    config = transformers.Olmo2Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.Olmo2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="run no adapters"):
        TpModelWorker(WorkerOptions(model=tmp_path, device="cpu", max_loras=1))
