"""Latent attention as it is served; that it equals transformers in chunks and mixtures is in test_families."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.conftest import LATENT
from packages.scheduler.tests.executor.graphs.graphed import Tape, init
from packages.scheduler.tests.models.families.test_families import Paged, load, some_tokens
from packages.scheduler.tests.models.test_hugging_face import assert_alike, changed, expected, generate, options
from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.attention.torch_native import TorchNativeLatent
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.ops import sampler_ops
from tercet.protocol.messages.values import unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, StepResult
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.graphs.warmup import one_page_runner, profile_run, worst_plan
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.loading import shape_of
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.layers.latent_attention import HeadProjections
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import Router
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.native_linear import use_native_projections
from tercet.scheduler.models.registry import build_model, load_config, parse_config
from tercet.scheduler.models.weights.weights import dummy_weights, load_weights
from tercet.scheduler.testing.quantized_checkpoints import Grain, write_checkpoint
from tercet.scheduler.testing.thread_ranks import on_ranks

Checkpoints = Callable[[str], Path]
CPU = torch.device("cpu")
NATIVE = pytest.mark.skipif(bool(missing_library()), reason=missing_library())

QUANTISED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 2,
    "vocab_size": 389,
    "max_position_embeddings": 128,
    "dtype": "float32",
}
ROUTED = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
}
GRAIN = Grain(block=(16, 32))


@pytest.mark.parametrize("backend", ["torch_native", "auto"])
@pytest.mark.parametrize("name", LATENT)
def test_a_worker_says_what_transformers_says(name: str, backend: str, checkpoints: Checkpoints) -> None:
    worker = TpModelWorker(options(checkpoints(name), attention_backend=backend))
    actual = generate(worker, 16)
    worker.close()
    assert_alike(actual, expected(checkpoints(name), 16))


@NATIVE
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_moe"])
@pytest.mark.parametrize(("quantization", "far"), [("int8", 0.5), ("int4", 5.0)])
def test_weights_are_rounded_as_they_are_loaded(
    name: str, quantization: Any, far: float, checkpoints: Checkpoints
) -> None:
    directory = checkpoints(name)
    exact, rounded = (
        generate(TpModelWorker(options(directory, quantization=given)), 1) for given in ("none", quantization)
    )
    distances = [abs(mine[0][1] - theirs[0][1]) for mine, theirs in zip(rounded, exact, strict=True)]
    assert 0 < max(distances) < far


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, attention_scale=16**-0.5),
        lambda config: replace(config, rope=replace(config.rope, interleaved=False)),
    ],
)
def test_what_transformers_was_equalled_in_counts(change: Any, checkpoints: Checkpoints) -> None:
    """The checkpoint does tell a model that weighs scores, or rotates, otherwise."""
    directory, tokens = checkpoints("deepseek_v3_yarn"), some_tokens(41, 1)
    model = load(directory)
    other = build_model(change(model.config))
    load_weights(other, directory)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(other, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize(
    "changes",
    [{"renormalize": False}, {"scale": 1.0}, {"top_groups": 4}, {"groups": 2}, {"score": "softmax"}],
)
def test_how_experts_are_chosen_counts(changes: dict[str, Any], checkpoints: Checkpoints) -> None:
    """The checkpoint does tell a model that chooses or weighs experts otherwise."""
    directory, tokens = checkpoints("deepseek_v3_moe"), some_tokens(41, 1)
    model = load(directory)
    moe = model.config.moe
    assert moe is not None
    routing = replace(moe.routing, **changes)
    other = build_model(replace(model.config, moe=replace(moe, routing=routing)))
    other.load_state_dict(model.state_dict(), strict=False)
    [right], [wrong] = Paged(model, 1).step((0, tokens)), Paged(other, 1).step((0, tokens))
    assert (right - wrong).abs().max() > 0.1


def norms(config: Mapping[str, Any] = QUANTISED) -> dict[str, torch.Tensor]:
    """Those of latents, which `write_checkpoint` leaves to others."""
    chance = torch.Generator().manual_seed(1)
    sizes = {"q_a_layernorm": config["q_lora_rank"], "kv_a_layernorm": config["kv_lora_rank"]}
    return {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.rand(size, generator=chance)
        for layer in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }


def two_steps(model: Any) -> torch.Tensor:
    paged, tokens = Paged(model, 1), some_tokens(30, 7)
    return torch.cat([*paged.step((0, tokens[:29])), *paged.step((0, tokens[29:]))])


@pytest.mark.parametrize(("kind", "experts"), [("deepseek", False), ("deepseek", True), ("channel", False)])
@pytest.mark.parametrize("dequantized", [False, True])
def test_quantised_checkpoints(kind: str, experts: bool, dequantized: bool, tmp_path: Path) -> None:
    """In one process and in two. What makes heads of latents is in full all the same, and not in few bits as well."""
    config = QUANTISED | (ROUTED if experts else {})
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": torch.linspace(0, 0.5, 8) for layer in range(2)}
    beside = norms() | (biases if experts else {})
    full = write_checkpoint(kind, tmp_path / "model", config, GRAIN, full=("mlp.gate",), beside=beside)
    wanted = two_steps(load(full))

    def make(shard: Shard) -> Any:
        model = build_model(load_config(tmp_path / "model"), shard=shard)
        load_weights(model, tmp_path / "model", dequantized=dequantized)
        return model

    model = make(Shard())
    for module in model.model.layers.modules():
        if isinstance(module, HeadProjections):
            assert module.quantized is None
            assert module.weight.is_meta is not dequantized
        elif isinstance(module, Linear) and not isinstance(module, Router):
            assert (module.quantized is None) == dequantized
    torch.testing.assert_close(two_steps(model), wanted, rtol=1e-4, atol=1e-4)
    for mine in on_ranks(2, lambda shard: two_steps(make(shard))):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


@NATIVE
@pytest.mark.parametrize("way", ["packed", "dequantized", "native"])
def test_experts_as_kimi_k25_is_published(way: str, tmp_path: Path) -> None:
    """In int4, in groups of 32, behind `language_model.` and beside a tower; all else is in full."""
    parts = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    kept = ["mlp.gate", *(f"self_attn.{part}" for part in parts)]
    kept += [f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")]
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": torch.linspace(0, 0.5, 8) for layer in range(2)}
    config: dict[str, Any] = {**QUANTISED, **ROUTED, "q_lora_rank": 64, "kv_lora_rank": 32}
    beside = norms(config) | biases
    full = write_checkpoint("packed", tmp_path / "text", config, Grain(group=32), full=tuple(kept), beside=beside)
    tensors = {f"language_model.{name}": each for name, each in load_file(tmp_path / "text/model.safetensors").items()}
    text = json.loads((tmp_path / "text/config.json").read_text())
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    text |= {"model_type": "kimi_k2", "quantization_config": {**text["quantization_config"], "ignore": ignored}}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    save_file(tensors | {"vision_tower.patch_embed.weight": torch.ones(2)}, directory / "model.safetensors")
    model = build_model(load_config(directory))
    load_weights(model, directory, dequantized=way != "packed")
    if way == "native":
        use_native_projections(model, load_library())
    torch.testing.assert_close(two_steps(model), two_steps(load(full)), rtol=1e-4, atol=1e-4)


def test_dummy_weights_in_few_bits() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = parse_config({**QUANTISED, "quantization_config": fp8}, {})
    model = build_model(config)
    dummy_weights(model, quantization=config.quantization)
    assert two_steps(model).isfinite().all()


class LateReading(TorchNativeLatent):
    """Reads lengths from the tensors when it attends, as a kernel in a graph does."""

    capturable = True
    bidirectional = False

    def attend(self, *given: Any) -> torch.Tensor:
        assert self._batch is not None
        self.plan(replace(self._batch, host_kv_lens=self._batch.kv_lens.tolist()))
        return super().attend(*given)


def run(model: Any, tape: Tape | None) -> list[StepResult]:
    """Three rows that come one after another, and decode, through graphs if there is a tape for them."""
    config = model.config
    shape = KVShape(page_size=4, kv_heads=1, head_dim=config.head_dim, dtype=config.dtype, rank=config.latent.rank)
    pool = KVPool([KVGroup(name="full", layers=dict.fromkeys(range(config.layers), shape), pages=24)], CPU, spare=True)
    backends = [LateReading]
    runner = ModelRunner(
        model,
        pool,
        backends[0],
        slots=3,
        context_length=32,
        vocab_size=config.vocab_size,
        device=CPU,
        graphs=None if tape is None else partial(CudaGraphRunner, model, pool, backends, tape),
    )
    results, lengths = [], [0, 0, 0]
    for step in range(9):
        starts = step // 2 if step in (0, 2, 4) else None
        slots = range(min(3, step // 2 + 1))
        counts = [5 + 2 * slot if slot == starts else 1 for slot in slots]
        rows = [Row(slot, lengths[slot], count, sample=True) for slot, count in zip(slots, counts, strict=True)]
        for slot, count in zip(slots, counts, strict=True):
            lengths[slot] += count
        introduced = [] if starts is None else [init(starts, some_tokens(5 + 2 * starts, starts).tolist(), top=0)]
        pages = [] if starts is None else [PageUpdate(starts, 0, [[*range(starts, 24, 3)]])]
        rows.sort(key=lambda row: row.count)
        results.append(runner.execute(Plan(step=step, introduce=introduced, pages=pages, rows=rows)).result())
        if runner.graphs is not None:
            runner.graphs.capture_next()
    return results


def test_graphs_replay_the_same_steps(checkpoints: Checkpoints) -> None:
    model, tape = load(checkpoints("deepseek_v3")), Tape()
    for replayed, plain in zip(run(model, tape), run(model, None), strict=True):
        assert replayed.token_ids == plain.token_ids
        for row, logprobs in plain.logprobs.items():
            chosen = unpack_floats(replayed.logprobs[row].chosen)
            assert chosen == pytest.approx(unpack_floats(logprobs.chosen), abs=1e-4)
    assert tape.replays > 3


def test_the_worst_step_is_rehearsed(checkpoints: Checkpoints) -> None:
    model = load(checkpoints("deepseek_v3"))
    config = model.config
    assert config.latent is not None
    shape = KVShape(page_size=4, kv_heads=1, head_dim=config.head_dim, dtype=config.dtype, rank=config.latent.rank)
    runner = one_page_runner(
        model,
        TorchNativeLatent,
        sampler_ops,
        dict.fromkeys(range(config.layers), shape),
        slots=3,
        context_length=64,
        vocab_size=config.vocab_size,
        device=CPU,
    )
    profile_run(runner, worst_plan(3, 40, 64), None, None)


def test_a_page_holds_each_latent_once(checkpoints: Checkpoints) -> None:
    worker = TpModelWorker(options(checkpoints("deepseek_v2")))
    pool = worker._pool
    keys, values = pool.layer(0)
    assert keys.shape[2:] == (1, 16 + 6)
    assert values.data_ptr() == keys.data_ptr()
    assert values.shape[3] == 16
    assert pool.bytes == 3 * keys.nbytes
    worker.close()


@pytest.mark.parametrize(("layer", "said"), [(3, {}), (3, {"num_nextn_predict_layers": 2}), (4, {})])
def test_layers_that_guess_further_tokens_are_left_out(
    layer: int, said: dict[str, int], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    directory = shutil.copytree(checkpoints("deepseek_v3"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    (directory / "config.json").write_text(json.dumps(config | said))
    tensors = load_file(directory / "model.safetensors")
    more = {f"model.layers.{layer}.{name}.weight": torch.zeros(3) for name in ("eh_proj", "mlp.gate", "enorm")}
    save_file(tensors | more, directory / "model.safetensors")
    if layer == 4:
        with pytest.raises(ModelError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight, "):
            load(directory)
    else:
        load(directory)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype fp8_e4m3: latents are not cached in 8 bits"),
        ({"max_loras": 2}, "max_loras 2: models with latent attention run no adapters"),
        ({"attention_backend": "flashinfer"}, "flashinfer"),
    ],
)
def test_what_latents_do_not_do_is_refused_by_name(
    given: dict[str, Any], message: str, checkpoints: Checkpoints
) -> None:
    with pytest.raises(ValueError, match=message):
        TpModelWorker(options(checkpoints("deepseek_v3"), **given))


@pytest.mark.parametrize("options", [{"window": 3}, {"softcap": 2.0}, {"sinks": torch.zeros(2)}])
def test_what_no_latents_have_is_refused(options: dict[str, Any]) -> None:
    backend, params = TorchNativeLatent(), AttentionParams(scale=1.0, **options)
    with pytest.raises(ValueError, match="no windows, soft caps or sinks"):
        backend.attend(torch.zeros(1, 2, 6), torch.zeros(1, 4, 1, 6), torch.zeros(1, 4, 1, 4), params)


def test_another_attention_over_latents_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """DeepSeek-V3.2 looks at some tokens alone, which an indexer chooses."""
    named = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    directory = changed(checkpoints("deepseek_v3"), tmp_path, named)
    with pytest.raises(ModelError, match="kv_lora_rank: keys and values that are cached in a latent form are not"):
        shape_of(options(directory), CPU)
