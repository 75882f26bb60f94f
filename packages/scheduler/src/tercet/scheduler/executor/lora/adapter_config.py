"""Parser of an adapter's adapter_config.json: PEFT's LoraConfig fields, and the rank and scale of each layer."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tercet.scheduler.file_fields import FileFields, Only, unsupported
from tercet.scheduler.model_files import ModelError

CONFIG = "adapter_config.json"
_NAME = re.compile(r"\^?([\w.]+)\$?")
_LAYER = re.compile(r"(?:^|\.)([^.]+)\.(\d+)\.")
_TRAINING = "used in training only"
_NOTE = "a note about how the file was made"
_BY_WEIGHTS = "the adapter's weights show its layers"

ADAPTER = FileFields(
    honoured=frozenset(
        {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
        | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    ),
    no_effect={
        "auto_mapping": _NOTE,
        "base_model_name_or_path": _NOTE,
        "corda_config": "read for init_lora_weights of corda only, which is refused",
        "ensure_weight_tying": "no layer that adapters can have here is tied",
        "eva_config": _TRAINING,
        "inference_mode": _TRAINING,
        "loftq_config": "read for init_lora_weights of loftq only, which is refused",
        "lora_dropout": _TRAINING,
        "lora_ga_config": "read for init_lora_weights of lora_ga only, which is refused",
        "megatron_core": "read beside megatron_config only, which is refused",
        "peft_version": _NOTE,
        "qalora_group_size": "read beside use_qalora only, which is refused",
        "revision": _NOTE,
        "runtime_config": "a choice of where PEFT computes",
        "task_type": "modules of a task are saved whole, which is refused by their weights",
    },
    refused={
        "alora_invocation_tokens": Only(
            "adapters that begin at invocation tokens (aLoRA) are not computed", empty_is_set=True
        ),
        "arrow_config": Only("routing among adapters (Arrow) is not computed", empty_is_set=True),
        "bias": Only("only 'none' is supported", ("none",)),
        "fan_in_fan_out": Only("transposed weights are not read"),
        "init_lora_weights": Only(
            "PEFT changes the weights of the model as it loads such an adapter: convert it to plain LoRA",
            (True, "gaussian", "eva", "orthogonal"),
        ),
        "kasa_config": Only("KaSA is not computed", empty_is_set=True),
        "layer_replication": Only("layers that are repeated are not computed"),
        "lora_bias": Only("biases are not computed"),
        "megatron_config": Only("layers of Megatron are not read"),
        "modules_to_save": Only("modules that are saved whole are not read"),
        "monteclora_config": Only("MonteCLoRA is not computed", empty_is_set=True),
        "target_parameters": Only("adapters of experts are not computed"),
        "trainable_token_indices": Only("trained tokens are not read"),
        "use_bdlora": Only("block-diagonal adapters (BD-LoRA) are not read", empty_is_set=True),
        "use_dora": Only("DoRA is not computed"),
        "use_qalora": Only("QALoRA is not computed"),
        "velora_config": Only("VeLoRA is not computed", empty_is_set=True),
    },
)
"""Fields of PEFT's LoraConfig and of its base classes."""


@dataclass(frozen=True)
class AdapterConfig:
    """The layers of an adapter, and the rank and scale of each."""

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, Any] = field(default_factory=dict)
    alphas: Mapping[str, Any] = field(default_factory=dict)
    targets: Sequence[str] | None = None
    """Full names of layers or dotted suffixes of them; None if only the weights show them."""
    excluded: Sequence[str] = ()
    layers: Sequence[int] | None = None
    layers_in: Sequence[str] = ()
    """Names of the module lists that `layers` indexes; empty for any list."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "AdapterConfig":
        """Parse a config. Raise ModelError, in one line, for an unsupported field."""
        if config.get("peft_type", "LORA") != "LORA":
            raise ModelError(f"its peft_type is {str(config['peft_type'])[:40]!r}, not 'LORA'")
        ADAPTER.check(config, f"{CONFIG}: ", unknown=False)
        rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
        patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        if not _is_rank(rank) or not _is_scale(alpha) or not all(isinstance(each, dict) for each in patterns):
            raise ModelError(f"{CONFIG}: r, lora_alpha and their patterns must be numbers")
        stabilised = config.get("use_rslora") or False
        if type(stabilised) is not bool:
            raise unsupported(f"{CONFIG}: use_rslora", stabilised, "only true and false are known")
        targets = config.get("target_modules")
        excluded = config.get("exclude_modules")
        return cls(
            rank,
            float(alpha),
            stabilised,
            ranks=patterns[0],
            alphas=patterns[1],
            targets=None if isinstance(targets, str) or not targets else _names("target_modules", targets),
            excluded=() if isinstance(excluded, str) else _names("exclude_modules", excluded or []),
            layers=_layers(config.get("layers_to_transform")),
            layers_in=_names("layers_pattern", config.get("layers_pattern") or []),
        )

    def scale(self, module: str, stored_rank: int) -> float:
        """Return the factor of the product of a layer's weights. Raise ModelError for weights of another rank."""
        rank = _of_pattern(self.ranks, module, self.rank)
        alpha = _of_pattern(self.alphas, module, self.alpha)
        if not _is_rank(rank) or not _is_scale(alpha):
            raise ModelError(f"{CONFIG}: rank_pattern and alpha_pattern must hold numbers")
        if rank != stored_rank:
            raise ModelError(f"{CONFIG}: the rank of {module[:200]} is {rank}, but its weights are of {stored_rank}")
        return float(alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)

    def check_target(self, module: str) -> None:
        """Raise ModelError if a layer has weights but the config excludes it."""
        if self.excluded and _is_named(module, self.excluded):
            raise ModelError(f"{CONFIG}: exclude_modules names {module[:200]}, but there are weights of it")
        if self.targets is None or module in self.targets:
            return
        if not _is_named(module, self.targets):
            raise ModelError(f"{CONFIG}: target_modules does not name {module[:200]}, but there are weights of it")
        if self.layers is not None:
            lists = [(name, int(number)) for name, number in _LAYER.findall(module)]
            number = next((number for name, number in lists if not self.layers_in or name in self.layers_in), None)
            if number not in self.layers:
                raise ModelError(
                    f"{CONFIG}: layers_to_transform leaves out {module[:200]}, but there are weights of it"
                )


def _names(name: str, value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ModelError(f"{CONFIG}: {name}: is no list of names")
    return names


def _layers(value: Any) -> list[int] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int for number in numbers):
        raise ModelError(f"{CONFIG}: layers_to_transform: is no list of numbers")
    return numbers


def _is_named(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: float) -> Any:
    """Return the value of the first pattern that matches a module. Patterns are full names or dotted suffixes.

    Raise ModelError for other regular expressions, because their search may not end.
    """
    for pattern, value in patterns.items():
        match = _NAME.fullmatch(pattern)
        if match is None:
            raise ModelError(f"{CONFIG}: {pattern[:100]!r} is no name of a layer")
        if module == match[1] or (not pattern.startswith("^") and module.endswith(f".{match[1]}")):
            return value
    return default


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_scale(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
