"""Adapters of every architecture against PEFT's, over transformers' models."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.scheduler.tests.conftest import (
    ALL,
    HYBRID_VARIANTS,
    HYBRIDS,
    LATENT,
    MIXTURES,
    NOT_NATIVE,
    distinct,
)
from packages.scheduler.tests.models.families.test_families import Paged, expected, load, some_tokens
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.ops.lora import LoRARows, LoRAWeights, Segment
from tercet.kernels.ops.projection import Norm
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.executor.lora.adapter_files import Adapter, AdapterError, read_adapter
from tercet.scheduler.models.layers import lora
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layer_ops import TorchLayerOps
from tercet.scheduler.models.layers.lora import AdaptedProjection, LoRABank
from tercet.scheduler.models.layers.shard import Shard, Stage
from tercet.scheduler.models.native import NativeCausalLM
from tercet.scheduler.models.native_linear import use_native_projections
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights
from tercet.scheduler.testing.lora_checkpoints import ALL_LINEAR, write_adapter
from tercet.scheduler.testing.thread_ranks import on_ranks

pytestmark = [  # which peft asks for
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]

Checkpoints = Callable[[str], Path]
Reference = Callable[..., Any]
MOST = 8
ATTENTION = r".*layers\.\d+\.self_attn\.\w+_proj"
TOKENS = some_tokens(37, 5)


def adapted(model: CausalLM, *directories: Path, places: int = 3) -> LoRABank:
    """A bank with an adapter at each of its first places."""
    bank = LoRABank(model, places, MOST, torch.float32, torch.device("cpu"))
    for place, directory in enumerate(directories):
        read = read_files(bank, directory)
        bank.install(place, read.layers, read.rank)
    return bank


def read_files(bank: LoRABank, directory: Path, sha256: str = "") -> Adapter:
    asked = LoRAAdapter(str(directory), sha256)
    return read_adapter(asked, bank.targets, MOST, torch.float32, bank.architecture, bank.weights.keys())


class Adapted(Paged):
    """Whose sequences have adapters: those at the places given, -1 being none."""

    def __init__(self, model: CausalLM, bank: LoRABank, places: Sequence[int]) -> None:
        super().__init__(model, len(places))
        self.places = places
        self.bank = bank

    def lora(self, rows: Sequence[tuple[int, torch.Tensor]]) -> LoRARows | None:
        runs, start = [], 0
        for sequence, tokens in rows:
            stop = start + len(tokens)
            if self.places[sequence] >= 0:
                firsts = range(start, stop, 16)
                runs += [Segment(self.places[sequence], first, min(first + 16, stop)) for first in firsts]
            start = stop
        return LoRARows(runs, torch.tensor(runs, dtype=torch.int32), self.bank.ranks) if runs else None


@torch.inference_mode()
def peft_logits(model: Any, directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    with_adapter = peft.PeftModel.from_pretrained(model, directory)
    logits: torch.Tensor = with_adapter(tokens[None]).logits[0].float()
    with_adapter.unload()
    return logits


def attached(directory: Path, *adapters: Path) -> tuple[CausalLM, LoRABank]:
    model = load(directory)
    bank = adapted(model, *adapters)
    bank.attach(model)
    return model, bank


def assert_as_peft(
    name: str,
    run: Callable[[CausalLM, LoRABank], Any],
    base: Path,
    model: Any,
    directory: Path,
    *,
    tolerance: float,
) -> None:
    """A prompt with an adapter in chunks and decodes, beside one with another and one with none.

    `run` makes what is run of a loaded model and its adapters; `model` is transformers' own.
    """
    modules = ATTENTION if name in MIXTURES else ALL_LINEAR  # peft takes the names of MLPs for experts'
    first = write_adapter(directory / "first", base, rank=4, seed=1, modules=modules)
    second = write_adapter(directory / "second", base, rank=7, seed=2, modules=modules, r=7, use_rslora=True)
    loaded = load(base)
    bank = adapted(loaded, first, second)
    paged = Adapted(loaded, bank, places=[0, 1, -1])
    paged.model = run(loaded, bank)
    parts = [paged.step((0, TOKENS[:19]), (1, TOKENS[:3]), (2, TOKENS[:20]))]
    parts += [paged.step((0, TOKENS[19:20]), (1, TOKENS[3:30]), (2, TOKENS[20:21]))]
    parts += [paged.step((0, TOKENS[20:21]), (1, TOKENS[30:31]), (2, TOKENS[21:22]))]
    got = [torch.cat(rows) for rows in zip(*parts, strict=True)]
    wanted = [
        peft_logits(model, first, TOKENS[:21]),
        peft_logits(model, second, TOKENS[:31]),
        expected(model, TOKENS[:22]),
    ]
    for logits, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(logits, right, atol=tolerance, rtol=2 * tolerance)
    assert (wanted[0] - wanted[2][:21]).abs().max() > 0.5  # an adapter that changes little would hide mistakes


FAMILIES = [name for name in ALL if name not in ("phi3_longrope", *LATENT)]
"""All but the one whose angles depend on how long a sequence is, and those that run no adapters."""


@pytest.mark.parametrize("name", distinct(FAMILIES))
def test_every_family_gives_what_peft_gives(
    name: str, checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    def run(model: CausalLM, bank: LoRABank) -> CausalLM:
        bank.attach(model)
        return model

    base = checkpoints(name)
    assert_as_peft(name, run, base, reference(base), tmp_path, tolerance=2e-4)


NOT_ADAPTED = r".*(lm_head|experts?|fc\d_latent_proj|kv_[ab]_proj|kv_a_proj_with_mqa|shared_expert_gate)\b.*"
"""Linear layers of models with recurrent state that have no adapters."""


def peft_adapter(model: Any, directory: Path, *, rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers that can have one, as PEFT names them.

    In Mamba 1, PEFT refuses `out_proj`, and transformers reads the weight of `dt_proj` past an adapter.
    """
    torch.manual_seed(seed)
    latent = {path.rpartition(".")[0] for path, _ in model.named_modules() if path.endswith(".kv_b_proj")}
    targets = [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not re.fullmatch(NOT_ADAPTED, path)
        if path.rpartition(".")[0] not in latent
        if not (model.config.model_type == "mamba" and path.endswith(("out_proj", "dt_proj")))
    ]
    if model.config.model_type == "qwen3_next":  # peft takes the names of MLPs for experts'
        targets = [path for path in targets if ".mlp." not in path]
    if "granite_hybrid_moe" in str(model.name_or_path):  # whose only MLPs are shared experts
        targets = [path for path in targets if ".shared_mlp." not in path]
    if model.config.model_type in ("mamba2", "falcon_h1", "nemotron_h"):  # peft adapts their input projections alone
        targets = [path for path in targets if not path.endswith(("mixer.out_proj", "mamba.out_proj"))]
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=targets, init_lora_weights="gaussian")
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if ".lora_" in name:
            weight.data = torch.randn_like(weight) * 0.08
    adapted.save_pretrained(str(directory))
    adapted.unload()
    return directory


SLOW = {"qwen3_5_moe", "lfm2_moe", "granite_hybrid_moe", "kimi_linear_dense", "olmo_hybrid_nope", *HYBRID_VARIANTS}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in (*HYBRIDS, *HYBRID_VARIANTS)],
)
def test_models_with_recurrent_state_give_what_peft_gives(
    name: str, checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    """A prompt with an adapter in chunks and decodes, beside one with another and one with none."""
    base = checkpoints(name)
    directories = [peft_adapter(reference(base), tmp_path / str(seed), rank=3 + seed, seed=seed) for seed in (1, 2)]
    model, bank = attached(base, *directories)
    paged = Adapted(model, bank, places=[0, 1, -1])
    parts = [paged.step((0, TOKENS[:19]), (1, TOKENS[:3]), (2, TOKENS[:20]))]
    parts += [paged.step((0, TOKENS[19:20]), (1, TOKENS[3:30]), (2, TOKENS[20:21]))]
    parts += [paged.step((0, TOKENS[20:21]), (1, TOKENS[30:31]), (2, TOKENS[21:22]))]
    got = [torch.cat(rows) for rows in zip(*parts, strict=True)]
    wanted = [
        peft_logits(reference(base), directories[0], TOKENS[:21]),
        peft_logits(reference(base), directories[1], TOKENS[:31]),
        expected(reference(base), TOKENS[:22]),
    ]
    for logits, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(logits, right, atol=5e-3, rtol=1e-3)
    assert (wanted[0] - wanted[2][:21]).abs().max() > 0.5


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("qwen3_next", "model.layers.0.mlp.shared_expert.up_proj"),
        ("kimi_linear", "model.layers.1.self_attn.kv_a_proj_with_mqa"),
        ("mamba2", "backbone.layers.0.mixer.conv1d"),
    ],
)
def test_other_layers_of_models_with_recurrent_state_are_refused(
    name: str, layer: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(name)
    pattern = re.escape(layer if "conv1d" not in layer else "backbone.layers.0.mixer.in_proj")
    renamed = {"backbone.layers.0.mixer.in_proj": "backbone.layers.0.mixer.conv1d"}
    adapter = write_adapter(
        tmp_path, base, modules=pattern, target_modules=[layer], named=lambda path: renamed.get(path, path)
    )
    bank = LoRABank(load(base), 1, MOST, torch.float32, torch.device("cpu"))
    refused = layer.replace("backbone", "model").replace("mixer", "mamba")
    with pytest.raises(AdapterError, match=f"{re.escape(refused)} is no layer that adapters can have here"):
        read_files(bank, adapter)


@pytest.mark.parametrize("name", ["llama", "phi3", "glm", "qwen3_moe", "gemma3"])
def test_two_ranks_give_what_one_process_gives(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints(name)
    adapter = write_adapter(tmp_path, base)

    def logits(shard: Shard) -> torch.Tensor:
        model = build_model(load_config(base), shard=shard)
        load_weights(model, base)
        bank = adapted(model, adapter)
        bank.attach(model)
        paged = Adapted(model, bank, [0, -1])
        steps = [((0, TOKENS[:20]), (1, TOKENS[:9])), ((0, TOKENS[20:21]), (1, TOKENS[9:10]))]
        return torch.cat([part for rows in steps for part in paged.step(*rows)])

    alone = logits(Shard())
    one, other = on_ranks(2, logits)
    torch.testing.assert_close(one, alone, atol=2e-4, rtol=1e-4)
    assert torch.equal(one, other)


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_beside_linears_on_native_kernels(checkpoints: Checkpoints, reference: Reference, tmp_path: Path) -> None:
    base = checkpoints("qwen2")
    adapter = write_adapter(tmp_path, base)
    model = load(base)
    bank = adapted(model, adapter)
    use_native_projections(model, load_library())
    bank.attach(model)
    [logits] = Adapted(model, bank, [0]).step((0, TOKENS))
    torch.testing.assert_close(logits, peft_logits(reference(base), adapter, TOKENS), atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
@pytest.mark.parametrize("name", distinct(name for name in FAMILIES if name not in NOT_NATIVE))
def test_the_native_decoder_gives_what_peft_gives(
    name: str, checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    def run(model: CausalLM, bank: LoRABank) -> NativeCausalLM:
        return NativeCausalLM(model, load_library(), adapters=bank)

    base = checkpoints(name)
    assert_as_peft(name, run, base, reference(base), tmp_path, tolerance=5e-4)


def test_a_place_that_is_taken_over_has_nothing_left_of_what_was_there(
    checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    large = write_adapter(tmp_path / "large", base, rank=8, r=8)
    small = write_adapter(tmp_path / "small", base, rank=2, r=2, modules=r".*\.1\.self_attn\.[qo]_proj", seed=3)
    model, bank = attached(base, large)
    read = read_files(bank, small)
    bank.install(0, read.layers, read.rank)
    [logits] = Adapted(model, bank, [0]).step((0, TOKENS))
    torch.testing.assert_close(logits, peft_logits(reference(base), small, TOKENS), atol=2e-4, rtol=1e-4)


def test_ranks_and_scales_of_single_layers(checkpoints: Checkpoints, reference: Reference, tmp_path: Path) -> None:
    base = checkpoints("llama")
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 6},
        "alpha_pattern": {"layers.2.self_attn.o_proj": 20, "up_proj": 1.5},
    }

    def rank(path: str) -> int:
        return 2 if path.endswith("q_proj") else 6 if path == "model.layers.1.mlp.down_proj" else 4

    adapter = write_adapter(tmp_path, base, rank=rank, **patterns)
    [logits] = Adapted(*attached(base, adapter), places=[0]).step((0, TOKENS))
    torch.testing.assert_close(logits, peft_logits(reference(base), adapter, TOKENS), atol=2e-4, rtol=1e-4)


def test_steps_without_adapters_equal_a_model_without_lora_bitwise(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    [plain] = Paged(load(base), 1).step((0, TOKENS))
    model, bank = attached(base, write_adapter(tmp_path, base))
    [logits] = Adapted(model, bank, [-1]).step((0, TOKENS))
    assert torch.equal(logits, plain)
    assert bank.rows is None


@pytest.mark.parametrize(("residual", "norms"), [(None, ["rmsnorm"]), (torch.ones(2, 4), ["add_rmsnorm"])])
def test_what_adapters_multiply_is_normed_once(residual: torch.Tensor | None, norms: list[str]) -> None:
    called: list[str] = []

    class Noted(TorchLayerOps):
        def rmsnorm(self, *given: Any) -> Any:
            called.append("rmsnorm")
            return rmsnorm(*given)

        def add_rmsnorm(self, *given: Any) -> Any:
            called.append("add_rmsnorm")
            return add_rmsnorm(*given)

    rows = LoRARows([Segment(0, 0, 2)], torch.tensor([[0, 0, 2]], dtype=torch.int32), [1])
    weights = LoRAWeights(torch.ones(1, 1, 4), torch.ones(1, 1, 3), (3,))
    ops = AdaptedProjection(Noted(), weights, cast("LoRABank", SimpleNamespace(rows=rows)))
    x, norm = torch.arange(8.0).view(2, 4), Norm(torch.ones(4), 1e-6)
    out, total = ops.project_normed(x, residual, norm, torch.zeros(3, 4))
    assert called == norms
    assert torch.equal(total, x if residual is None else x + residual)
    torch.testing.assert_close(out, rmsnorm(total, *norm).sum(1, keepdim=True).expand(2, 3))


def test_a_faster_projection_with_adapters_has_the_norm_and_the_residual() -> None:
    given: list[dict[str, Any]] = []

    class Fused(TorchLayerOps):
        def project_adapted(self, *_: object, **named: Any) -> Any:
            given.append(named)
            return torch.full((1, 4), 2.0)

    rows = LoRARows([Segment(0, 0, 1)], torch.tensor([[0, 0, 1]], dtype=torch.int32), [1])
    weights = LoRAWeights(torch.ones(1, 1, 4), torch.ones(1, 1, 4), (4,))
    ops = AdaptedProjection(Fused(), weights, cast("LoRABank", SimpleNamespace(rows=rows)))
    x, norm, weight = torch.ones(1, 4), Norm(torch.ones(4), 1e-6), torch.zeros(4, 4)
    twos = torch.full((1, 4), 2.0)
    assert torch.equal(ops.project(x, weight), twos)
    out, total = ops.project_normed(x, None, norm, weight)
    assert torch.equal(out, twos)
    assert total is x
    assert ops.project_normed(x, None, norm, weight, gate="silu")[0].shape == (1, 2)
    total_onto, left = ops.project_onto(x, x, weight)
    assert torch.equal(total_onto, twos)
    assert left is None
    assert given == [{}, {"norm": norm}, {"norm": norm}, {"residual": x}]


def test_a_part_of_a_step_has_the_adapters_of_its_tokens() -> None:
    runs = [Segment(0, 0, 5), Segment(2, 5, 21), Segment(1, 30, 31)]
    rows = LoRARows(runs, torch.tensor(runs, dtype=torch.int32), [4, 4, 4])
    part = rows.part(slice(3, 30))
    assert part is not None
    assert part.runs == [Segment(0, 0, 2), Segment(2, 2, 18)]
    assert part.table.tolist() == [[0, 0, 2], [2, 2, 18]]
    assert part.order is None
    assert rows.part(slice(21, 30)) is None


def test_a_part_of_sorted_tokens_is_sorted() -> None:
    """A kernel for tokens as they come would be compiled by the step that has to be cut."""
    runs = [Segment(1, 0, 3), Segment(0, 3, 20), Segment(1, 21, 24)]
    rows = LoRARows(runs, torch.tensor(runs, dtype=torch.int32), [4, 4]).sorted_by_slot(70)
    assert rows.longest == 64
    part = rows.part(slice(2, 23))
    assert part is not None
    assert part.order is not None
    assert part.runs == [Segment(1, 0, 1), Segment(0, 1, 18), Segment(1, 19, 21)]
    assert part.order.tolist() == [*range(1, 18), 0, 19, 20]
    assert part.table.tolist() == [[0, 0, 16], [0, 16, 17], [1, 17, 20]]
    assert part.longest == 16


def changed(directory: Path, **config: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def renamed(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = directory / "adapter_model.safetensors"
    save_file({name: tensor.clone() for name, tensor in change(load_file(path)).items()}, path)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda path: (path / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
    "no weights": (lambda path: (path / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot"),
    "garbage": (lambda path: (path / "adapter_model.safetensors").write_bytes(b"\xff" * 999), "safetensors: "),
    "cut off": (
        lambda path: (path / "adapter_model.safetensors").write_bytes(
            (path / "adapter_model.safetensors").read_bytes()[:-9]
        ),
        "safetensors: ",
    ),
    "no JSON": (lambda path: (path / "adapter_config.json").write_text("{"), "cannot be read as JSON"),
    "deep JSON": (lambda path: (path / "adapter_config.json").write_text("[" * 99999), "cannot be read as JSON"),
    "no object": (lambda path: (path / "adapter_config.json").write_text("[]"), "holds no JSON object"),
    "too large": (lambda path: (path / "adapter_model.safetensors").write_bytes(bytes(50_000_000)), "is larger than"),
    "another kind": (lambda path: changed(path, peft_type="IA3"), "its peft_type is 'IA3'"),
    "dora": (lambda path: changed(path, use_dora=True), "DoRA"),
    "saved modules": (lambda path: changed(path, modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (lambda path: changed(path, bias="all"), "bias"),
    "no rank": (lambda path: changed(path, r=0), "must be numbers"),
    "no number": (lambda path: changed(path, lora_alpha="8"), "must be numbers"),
    "no finite number": (lambda path: changed(path, lora_alpha=float("inf")), "lora_alpha is not a finite number"),
    "a pattern to search": (lambda path: changed(path, alpha_pattern={"(a+)+$": 3}), "is no name of a layer"),
    "a pattern of text": (lambda path: changed(path, rank_pattern={"q_proj": "4"}), "must hold numbers"),
    "other layers": (
        lambda path: renamed(
            path,
            lambda tensors: (
                tensors
                | {
                    "base_model.model.lm_head.lora_A.weight": torch.ones(4, 48),
                    "base_model.model.lm_head.lora_B.weight": torch.ones(9, 4),
                }
            ),
        ),
        "lm_head is no layer",
    ),
    "other tensors": (lambda path: renamed(path, lambda tensors: tensors | {"x": torch.ones(2)}), "x is no weight"),
    "integers": (
        lambda path: renamed(
            path, lambda tensors: tensors | {f"{Q}.lora_A.weight": torch.ones(4, 48, dtype=torch.int8)}
        ),
        "is no weight of",
    ),
    "half a layer": (
        lambda path: renamed(path, lambda tensors: {k: v for k, v in tensors.items() if k != f"{Q}.lora_B.weight"}),
        "do not fit together",
    ),
    "two ranks": (
        lambda path: renamed(path, lambda tensors: tensors | {f"{Q}.lora_A.weight": torch.ones(5, 48)}),
        "do not fit together",
    ),
    "another shape": (
        lambda path: renamed(path, lambda tensors: tensors | {f"{Q}.lora_A.weight": torch.ones(4, 47)}),
        "is of 47 inputs and 48 outputs, not of 48 and 48",
    ),
    "nothing": (lambda path: renamed(path, lambda _: {}), "its rank is 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_cannot_be_run_are_refused_by_what_is_wrong(
    damage: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    adapter = write_adapter(tmp_path, base)
    spoil, why = DAMAGE[damage]
    spoil(adapter)
    bank = LoRABank(load(base), 1, MOST, torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterError, match=why) as caught:
        read_files(bank, adapter)
    assert "\n" not in str(caught.value)


def test_a_rank_beyond_what_there_is_memory_for_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    adapter = write_adapter(tmp_path, base, rank=9, r=9)
    bank = LoRABank(load(base), 1, MOST, torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterError, match=r"its rank is 9; 1 to 8 are possible here \(--max-lora-rank\)"):
        read_files(bank, adapter)


def test_files_that_have_changed_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    adapter = write_adapter(tmp_path, base)
    bank = LoRABank(load(base), 1, MOST, torch.float32, torch.device("cpu"))
    first = read_files(bank, adapter).sha256
    assert read_files(bank, adapter, first).sha256 == first
    changed(adapter, lora_alpha=9)
    with pytest.raises(AdapterError, match="others than when it was loaded"):
        read_files(bank, adapter, first)
    assert read_files(bank, adapter).sha256 != first


def test_a_pipeline_stage_keeps_its_own_layers_and_checks_all(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    config, stage = load_config(base), Stage(1, 2)
    model = build_model(config, shard=Shard(stage=stage))
    bank = LoRABank(model, 1, MOST, torch.float32, torch.device("cpu"), all_stages=build_model(config, "meta"))
    adapter = write_adapter(tmp_path, base)
    kept = {int(path.split(".")[2]) for path in read_files(bank, adapter).layers}
    assert kept == {*stage.layers(config.layers)} != {*range(config.layers)}
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"model\.layers\.0\.mlp\.down_proj is of \d+ inputs"):
        read_files(bank, adapter)


def test_a_path_that_is_none_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    bank = LoRABank(load(checkpoints("llama")), 1, MOST, torch.float32, torch.device("cpu"))
    with pytest.raises(AdapterError, match="neither a directory nor a Hugging Face id"):
        read_files(bank, tmp_path / "nowhere")
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot"):
        read_files(bank, tmp_path)


@pytest.mark.parametrize("scarce", [False, True])
def test_adapters_come_from_any_memory_where_none_can_be_pinned(scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def taken(*size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        if scarce and pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return empty(*size, **how)

    class OnGPU(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda")

    target, source = torch.zeros(3).as_subclass(OnGPU), torch.tensor([1.0, 2.0, 3.0])
    monkeypatch.setattr("torch.empty", taken)
    lora._copy_async(target, source)
    assert (target.as_subclass(torch.Tensor).tolist(), pinned[0]) == ([1.0, 2.0, 3.0], True)
