"""The facts about a model family that reading its config.json needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tercet.scheduler.models.config.attention_windows import Windows
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import FieldTable
from tercet.scheduler.models.config.latent_config import LatentDefaults
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults, MoeDefaults


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """The fields of a family, and what it takes for those that are absent. Values equal transformers'."""

    fields: FieldTable
    """Its own fields. The others are those of `field_support.EVERY`."""
    defaults: ConfigDefaults = field(default_factory=ConfigDefaults)
    windows: Windows | None = None
    """Sliding windows; None if it reads no field for them."""
    moe: MoeDefaults | DeepSeekMoeDefaults | None = None
    """Mixtures of experts."""
    latent: LatentDefaults | None = None
    """Multi-head latent attention."""
    normalize: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """A translation of the honoured fields to those of other families."""
    adapt: Callable[[ModelConfig, Fields], ModelConfig] | None = None
    """A change of the parsed config, by fields that no other family has."""
