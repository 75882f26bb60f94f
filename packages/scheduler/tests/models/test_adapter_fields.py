"""Each field of adapter_config.json at another value: what PEFT computes, or a refusal by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from packages.scheduler.tests.models.families.test_families import load
from packages.scheduler.tests.models.layers.test_lora import MOST, TOKENS, Adapted, adapted, attached, peft_logits
from tercet.scheduler.executor.lora.adapter_config import ADAPTER, AdapterConfig
from tercet.scheduler.executor.lora.adapter_files import AdapterError
from tercet.scheduler.file_fields import FileFields, Only
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.testing.lora_checkpoints import write_adapter

pytestmark = [  # which peft asks for
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

Checkpoints = Callable[[str], Path]
Reference = Callable[..., Any]
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]

HONOURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "patterns": {
        "r": 3,
        "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.down_proj": 5},
        "alpha_pattern": {"layers.0.self_attn.o_proj": 20, "up_proj": 2},
        "use_rslora": True,
    },
    "one layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["layers.1.mlp.up_proj", "v_proj"]},
    "excluded by an expression": {"exclude_modules": r".*\.1\.mlp\..*"},
    "an expression": {"target_modules": r".*layers\.[02]\.(self_attn|mlp)\.(k|gate|down)_proj"},
    "all": {"target_modules": "all-linear"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva", "eva_config": peft.EvaConfig()},
    "of training": {"lora_dropout": 0.4, "init_lora_weights": False},
}


@pytest.mark.parametrize("name", HONOURED)
def test_adapters_that_peft_saves_give_what_peft_gives(
    name: str, checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    fields = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", **HONOURED[name]}
    made = peft.get_peft_model(reference(base), peft.LoraConfig(**fields))
    with torch.no_grad():
        torch.manual_seed(3)
        for path, weight in made.named_parameters():
            if "lora_" in path:
                weight.normal_(0, 0.2)
    made.save_pretrained(str(tmp_path))
    [logits] = Adapted(*attached(base, tmp_path), places=[0]).step((0, TOKENS))
    wanted = peft_logits(reference(base), tmp_path, TOKENS)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    made.unload()


VALUES: dict[str, Any] = {
    "bias": "lora_only",
    "init_lora_weights": "pissa_niter_4",
    "use_bdlora": {},
    "arrow_config": {},
    "kasa_config": {},
    "monteclora_config": {},
    "velora_config": {},
    "alora_invocation_tokens": [5, 6],
    "layer_replication": [[0, 2], [1, 3]],
    "trainable_token_indices": {"embed_tokens": [3]},
    "modules_to_save": ["lm_head"],
    "target_parameters": ["mlp.experts.down_proj"],
    "megatron_config": {"tensor_model_parallel_size": 2},
}


@pytest.mark.parametrize("name", ADAPTER.refused)
def test_what_is_not_computed_is_refused_by_name(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    value = VALUES.get(name, True)
    adapter = write_adapter(tmp_path, base, **{name: value})
    with pytest.raises(AdapterError, match=rf"^adapter_config\.json: {name}: .* is not supported: "):
        adapted(load(base), adapter)


@pytest.mark.parametrize("kind", ["pissa", "olora", "corda", "loftq", "lora_ga", "mica", "PiSSA"])
def test_ways_to_begin_that_change_the_model_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"init_lora_weights: '{kind}' is not supported"):
        AdapterConfig.parse({"peft_type": "LORA", "init_lora_weights": kind})


@pytest.mark.parametrize("value", [7, "on", [1], {"a": 1}, True, 0.0, 0])
def test_unknown_fields_are_refused_unless_they_ask_for_nothing(value: Any) -> None:
    unset: dict[str, Any] = {"later": None, "other": False, "more": [], "and": {}, "last": ""}
    AdapterConfig.parse({"peft_type": "LORA", **unset})
    with pytest.raises(ModelError, match=r"^adapter_config\.json: later: .* is not supported: the field is unknown"):
        AdapterConfig.parse({"peft_type": "LORA", **unset, "later": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_modules": ["q_proj"]}, r"target_modules does not name model\.layers\.\d\.\w+\.\w+"),
        ({"target_modules": ["proj"]}, "target_modules does not name"),
        ({"exclude_modules": ["up_proj"]}, r"exclude_modules names model\.layers\.\d\.mlp\.up_proj"),
        ({"layers_to_transform": [0, 1]}, r"layers_to_transform leaves out model\.layers\.2\."),
        ({"layers_to_transform": 0}, r"layers_to_transform leaves out model\.layers\.[12]\."),
        ({"layers_to_transform": [0, 1, 2, 3], "layers_pattern": ["h"]}, "layers_to_transform leaves out"),
        ({"r": 8}, r"the rank of model\.layers\.\d\.\S+ is 8, but its weights are of 4"),
        ({"target_modules": {"q_proj": 1}}, "target_modules: is no list of names"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform: is no list of numbers"),
        ({"use_rslora": "yes"}, "use_rslora: 'yes' is not supported"),
    ],
)
def test_weights_that_the_config_leaves_out_are_refused(
    change: dict[str, Any], message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """PEFT would not compute them."""
    base = checkpoints("llama")
    adapter = write_adapter(tmp_path, base)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text()) | {"target_modules": targets}
    path.write_text(json.dumps(config))
    assert adapted(load(base), adapter).ranks[0] == 4 <= MOST
    path.write_text(json.dumps(config | change))
    with pytest.raises(AdapterError, match=f"^adapter_config.json: {message}"):
        adapted(load(base), adapter)


def test_a_field_has_one_class() -> None:
    with pytest.raises(ValueError, match=r"in two classes: a$"):
        FileFields(honoured=frozenset({"a"}), refused={"a": Only("of no reason")})
