"""A scheduler process that serves an encoder among real peers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from packages.scheduler.tests.conftest import write_tokenizer
from tercet.protocol.messages.messages import BatchEmbeddingOutput, Rejected, TokenizerFiles, TokenizerFilesReq
from tercet.protocol.messages.values import ModelLimits, Role, Task, unpack_floats, unpack_ints
from tercet.protocol.node import PeerDown, PeerReady
from tercet.protocol.testing import Listener, Network
from tercet.scheduler.config import ConfigError, ModelOptions, ProcessOptions, ScheduleOptions
from tercet.scheduler.encoder_factory import ENCODERS
from tercet.scheduler.model_files import ModelError, model_identity
from tercet.scheduler.model_task import read_sentences, task_of
from tercet.scheduler.testing import embedding_request, request
from tercet.scheduler.wiring import SchedulerProcess

PATIENCE = 60.0
INPUTS = {"a": [5, 6, 7], "b": [8] * 30, "c": [9, 10]}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Bert whose vectors are means over tokens, normalised."""
    directory = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.BertModel(config).save_pretrained(directory)
    write_tokenizer(directory)
    types = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in zip(types, paths, strict=True)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40}))
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    return directory


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(heartbeat_interval=0.25, silence=10.0) as network:
        yield network


def test_a_process_gives_vectors_refuses_text_and_drains(network: Network, encoder: Path) -> None:
    frontend = Listener(network.node(Role.FRONTEND))
    command = [sys.executable, "-m", "tercet.scheduler", "--peer", "scheduler-0", "--device", "cpu"]
    command += ["--listen", f"ipc://{network.directory}", "--model", str(encoder), "--chunked-prefill-size", "8"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        ready = frontend.wait_for(PeerReady, "scheduler-0", timeout=PATIENCE).message
        assert isinstance(ready, PeerReady)
        assert ready.ready.limits == ModelLimits(
            model=encoder.name, context_length=40, vocab_size=60, max_total_tokens=40, task=Task.EMBED, width=32
        )
        for rid, ids in INPUTS.items():
            frontend.node.send("scheduler-0", embedding_request(rid, ids))
        vectors: dict[str, list[float]] = {}
        while len(vectors) < len(INPUTS):
            delivery = frontend.wait_for(BatchEmbeddingOutput, timeout=PATIENCE)
            batch = delivery.message
            assert isinstance(batch, BatchEmbeddingOutput)
            assert batch.finishes == {}
            [frame] = delivery.frames
            numbers = unpack_floats(bytes(frame))
            for row, rid in enumerate(batch.rids):
                vectors[rid] = list(numbers[32 * row : 32 * (row + 1)])
            assert set(unpack_ints(batch.attempts)) == {0}
        model = transformers.BertModel.from_pretrained(encoder).eval()
        for rid, ids in INPUTS.items():
            with torch.inference_mode():
                mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            torch.testing.assert_close(torch.tensor(vectors[rid]), mean / mean.norm(), rtol=1e-5, atol=1e-5)

        frontend.node.send("scheduler-0", request("text", [1, 2]))
        refused = frontend.wait_for(Rejected, timeout=PATIENCE).message
        assert isinstance(refused, Rejected)
        assert (refused.rid, refused.code) == ("text", "invalid_request")
        frontend.node.send("scheduler-0", TokenizerFilesReq(id="t"))
        files = frontend.wait_for(TokenizerFiles, timeout=PATIENCE).message
        assert isinstance(files, TokenizerFiles)
        assert {"config_sentence_transformers.json", "sentence_bert_config.json"} <= set(files.names)

        process.send_signal(signal.SIGTERM)
        down = frontend.wait_for(PeerDown, timeout=PATIENCE).message
        assert isinstance(down, PeerDown)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def write(directory: Path, architecture: str, modules: object = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
    return directory


@pytest.mark.parametrize(
    ("architecture", "sentences", "task"),
    [
        ("BertModel", False, Task.EMBED),
        ("ModernBertForMaskedLM", True, Task.EMBED),
        ("XLMRobertaForSequenceClassification", True, Task.CLASSIFY),
        ("Qwen3ForCausalLM", False, Task.GENERATE),
        ("Qwen3ForCausalLM", True, Task.EMBED),
        ("Qwen3Model", False, Task.EMBED),
        ("Qwen3ForSequenceClassification", False, Task.CLASSIFY),
        ("UnknownForCausalLM", False, Task.GENERATE),
        ("Llama4ForCausalLM", True, Task.GENERATE),
    ],
)
def test_a_model_s_files_say_what_it_is_for(architecture: str, sentences: bool, task: Task, tmp_path: Path) -> None:
    assert task_of(write(tmp_path / "m", architecture, [] if sentences else None)) is task


def test_a_model_can_only_be_told_to_do_what_it_can(tmp_path: Path) -> None:
    decoder, encoder = write(tmp_path / "d", "LlamaForCausalLM"), write(tmp_path / "e", "BertModel")
    assert task_of(decoder, "embed") is Task.EMBED
    with pytest.raises(ModelError, match="cannot generate: a BertModel is there to embed"):
        task_of(encoder, "generate")
    with pytest.raises(ModelError, match="generate or embed"):
        task_of(decoder, "classify")
    with pytest.raises(ModelError, match="cannot embed: a Glm4MoeForCausalLM is there to generate"):
        task_of(write(tmp_path / "o", "Glm4MoeForCausalLM"), "embed")  # though its name begins as that of a Glm


TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_cls_token": True}, "Dense"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            "cls_token and max_tokens",
        ),
        ([TRANSFORMER, POOLING], {"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True, "include_prompt": False}, "prompt"),
        ([TRANSFORMER, {**POOLING, "path": "../1_Pooling"}], {"pooling_mode_mean_tokens": True}, "no folder"),
        ([TRANSFORMER], {}, "Pooling"),
        ({}, {}, "list of modules"),
    ],
)
def test_sentence_files_that_cannot_be_honoured_are_refused(
    modules: object, pooling: object, named: str, tmp_path: Path
) -> None:
    directory = write(tmp_path / "m", "BertModel", modules)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ModelError, match=named):
        read_sentences(directory, causal=False)


def test_another_way_of_pooling_is_another_model(encoder: Path) -> None:
    before = model_identity(encoder, "float32").weights
    path = encoder / "1_Pooling" / "config.json"
    kept = path.read_text()
    path.write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert model_identity(encoder, "float32").weights != before
    path.write_text(kept)
    assert model_identity(encoder, "float32").weights == before


def test_an_encoder_has_no_cache(encoder: Path) -> None:
    options = ModelOptions(model=str(encoder), device="cpu", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3 is for models that generate"):
        ENCODERS["torch"](options, Task.EMBED, encoder, lambda *_: None, lambda: None)


def test_an_encoder_is_not_shared(encoder: Path) -> None:
    options = ModelOptions(model=str(encoder), device="cpu", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is for models that generate"):
        ENCODERS["torch"](options, Task.EMBED, encoder, lambda *_: None, lambda: None)


def test_an_unknown_attention_backend_is_refused_before_a_download(network: Network) -> None:
    process = ProcessOptions(peer="scheduler-0", listen=f"ipc://{network.directory}")
    options = ModelOptions(model="nobody/nothing", attention_backend="flash")
    with pytest.raises(
        ConfigError, match="--attention-backend flash: must be auto, cpu, cudnn, flashinfer, torch_native"
    ):
        SchedulerProcess(process, options, ScheduleOptions()).run()


def test_what_an_encoder_does_is_not_recorded(network: Network, encoder: Path, tmp_path: Path) -> None:
    process = ProcessOptions(peer="scheduler-0", listen=f"ipc://{network.directory}", event_log=str(tmp_path / "log"))
    with pytest.raises(ConfigError, match="event-log"):
        SchedulerProcess(process, ModelOptions(model=str(encoder)), ScheduleOptions()).run()
