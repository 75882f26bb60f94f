"""The config.json fields of alternating updates (AltUp) and of what comes with them in Gemma 3n."""

from dataclasses import dataclass

from tercet.scheduler.models.config.config_fields import Fields, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Several hidden states for each token. A layer computes with one of them, and predicts and corrects the others."""

    states: int
    active: int
    """The state that layers compute with."""
    scales_correction: bool
    laurel_rank: int
    """Rank of the learned residual (LAuReL) beside attention."""
    mlp_sizes: tuple[int, ...]
    """Intermediate size of each layer's MLP."""
    sparsity: tuple[float, ...]
    """Share of each MLP's gates that are cut to zero; 0 for none."""


def parse_altup(fields: Fields, layers: int) -> AltUpConfig:
    """Parse the fields, with the defaults of Gemma 3n. Raise ModelError."""
    states, active = fields.count("altup_num_inputs", 4, least=2), fields.count("altup_active_idx", 0, least=0)
    if active >= states:
        raise wrong("altup_active_idx", f"{active} is none of the {states} states")
    return AltUpConfig(
        states=states,
        active=active,
        scales_correction=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.count("laurel_rank", 64),
        mlp_sizes=mlp_sizes(fields.values["mlp_sizes"], layers),
        sparsity=_sparsity(fields.values.get("activation_sparsity_pattern"), layers),
    )


def _sparsity(value: object, layers: int) -> tuple[float, ...]:
    """Return the share of gates that each layer cuts."""
    few = 10 if layers > 10 else 0
    shares = [0.95] * few + [0.0] * (layers - few) if value is None else value
    if (
        not isinstance(shares, list)
        or len(shares) != layers
        or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares)
    ):
        raise wrong("activation_sparsity_pattern", f"must have a share below 1 for each of the {layers} layers")
    return tuple(map(float, shares))


def mlp_sizes(value: object, layers: int) -> tuple[int, ...]:
    """Return the intermediate size of each layer, of which a config has a list, or one number for all."""
    sizes = value if isinstance(value, list) else [value] * layers
    if len(sizes) != layers or not all(type(size) is int and size > 0 for size in sizes):
        raise wrong("intermediate_size", f"must be a size, or one for each of the {layers} layers")
    return tuple(sizes)
