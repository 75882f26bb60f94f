"""The config.json fields of recurrent layers, and the state that each keeps for a sequence."""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch

from tercet.protocol.json_files import INFINITY
from tercet.scheduler.models.config.config_fields import Fields, wrong

_LINEAR, _FULL, _CONV = "linear_attention", "full_attention", "conv"
MAMBA_KINDS, ATTENTION_KINDS = ("mamba", "linear_attention"), ("attention", "full_attention")
"""Names of the kinds of layers in models with Mamba 2 layers: older ones, and those of transformers 5."""


class StateTensor(NamedTuple):
    """A tensor of one layer's state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RecurrentConfig(Protocol):
    """Layers with a recurrent state in place of keys and values."""

    @property
    def layers(self) -> frozenset[int]:
        """The layers that keep a state."""
        ...

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the tensors of one layer's state, for a model in `dtype`."""
        ...

    def share(self, ranks: int) -> "RecurrentConfig":
        """Return what one of several ranks has. Raise ValueError for heads that they cannot share evenly."""
        ...


def _share(count: int, what: str, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"{count} {what} of recurrent states cannot be split over {ranks} processes")
    return count // ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """Gated DeltaNet and Kimi Delta Attention layers: a convolution over queries, keys and values, then the gated delta
    rule.
    """

    layers: frozenset[int]
    key_heads: int
    heads: int
    """Heads of values; each key head serves consecutive ones."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution covers."""
    norm_eps: float
    """Epsilon of the norm of outputs."""
    most_beta: float = 1.0
    """Limit of the rate at which a value is replaced; above 1, a state may change its sign."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def share(self, ranks: int) -> "DeltaNetConfig":
        """See `RecurrentConfig`."""
        key_heads, heads = _share(self.key_heads, "key heads", ranks), _share(self.heads, "value heads", ranks)
        return replace(self, key_heads=key_heads, heads=heads)

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and the heads' matrices in float32."""
        matrices = StateTensor((self.heads, self.key_dim, self.value_dim), torch.float32)
        return StateTensor((self.channels, self.taps - 1), dtype), matrices


def parse_delta_net(fields: Fields, layers: int) -> DeltaNetConfig:
    """Parse Gated DeltaNet layers, with the defaults of Qwen3-Next and Qwen3.5. Raise ModelError."""
    every = fields.count("full_attention_interval", 4)
    kinds = [_LINEAR if (layer + 1) % every else _FULL for layer in range(layers)]
    if fields.has("layer_types"):
        kinds = fields.kinds("layer_types", (_LINEAR, _FULL), layers)
    config = DeltaNetConfig(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR),
        key_heads=fields.count("linear_num_key_heads", 16),
        heads=fields.count("linear_num_value_heads", 32),
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
        taps=fields.count("linear_conv_kernel_dim", 4, least=2),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )
    if config.heads % config.key_heads:
        raise wrong("linear_num_value_heads", f"{config.heads} is no multiple of {config.key_heads} key heads")
    return config


def parse_kimi_delta(fields: Fields, layers: int) -> DeltaNetConfig:
    """Parse the Kimi Delta Attention layers of Kimi-Linear. Raise ModelError."""
    heads, size = fields.count("linear_num_heads", 32), fields.count("linear_head_dim", 128)
    kinds = [_FULL if layer and layer % 4 == 0 else _LINEAR for layer in range(layers)]
    if fields.has("layer_types"):
        kinds = fields.kinds("layer_types", (_LINEAR, _FULL), layers)
    return DeltaNetConfig(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR),
        key_heads=heads,
        heads=heads,
        key_dim=size,
        value_dim=size,
        taps=fields.count("linear_conv_kernel_dim", 4, least=2),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """LFM2's layers: a gated convolution over a few tokens."""

    layers: frozenset[int]
    channels: int
    taps: int
    bias: bool

    def share(self, ranks: int) -> "ShortConvConfig":
        """See `RecurrentConfig`."""
        return replace(self, channels=_share(self.channels, "channels", ranks))

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution."""
        return (StateTensor((self.channels, self.taps - 1), dtype),)


def parse_short_conv(fields: Fields, layers: int, channels: int) -> ShortConvConfig:
    """Parse the convolutions of LFM2. Raise ModelError."""
    if fields.has("layer_types"):
        kinds = fields.kinds("layer_types", (_CONV, _FULL), layers)
    else:
        full = fields.layer_list("full_attn_idxs")
        kinds = [_FULL if full is None or layer in full else _CONV for layer in range(layers)]
    return ShortConvConfig(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == _CONV),
        channels=channels,
        taps=fields.count("conv_L_cache", 3, least=2),
        bias=fields.flag("conv_bias"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Mamba 2 layers: a convolution, then a state space scan, both over values and what they are read and added by."""

    layers: frozenset[int]
    heads: int
    head_dim: int
    groups: int
    """Each group of B and C serves consecutive heads."""
    state_dim: int
    taps: int
    conv_bias: bool
    bias: bool
    """The input projection has a bias."""
    output_bias: bool
    time_step: tuple[float, float]
    """Limits of the time step."""
    norm: Literal["after gate", "before gate"] | None = "after gate"
    """Place of the norm of outputs; None if there is none."""
    norm_eps: float

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    def share(self, ranks: int) -> "Mamba2Config":
        """See `RecurrentConfig`. Several ranks may have the same group."""
        groups = 1 if ranks % self.groups == 0 else _share(self.groups, "groups", ranks)
        return replace(self, heads=_share(self.heads, "heads", ranks), groups=groups)

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and the heads' matrices in float32."""
        matrices = StateTensor((self.heads, self.head_dim, self.state_dim), torch.float32)
        return StateTensor((self.channels, self.taps - 1), dtype), matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Mamba 1 layers: a convolution, then a selective scan whose time steps and matrices are projections of it."""

    layers: frozenset[int]
    channels: int
    state_dim: int
    step_rank: int
    """Rank of the projection to time steps."""
    taps: int
    conv_bias: bool
    bias: bool
    norm_eps: float | None = None
    """Epsilon of the norms of time steps, B and C; None if there are none."""

    def share(self, ranks: int) -> "MambaConfig":
        """See `RecurrentConfig`."""
        return replace(self, channels=_share(self.channels, "channels", ranks))

    def state_tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the last inputs of the convolution, and the states of all channels in float32."""
        states = StateTensor((self.channels, self.state_dim), torch.float32)
        return StateTensor((self.channels, self.taps - 1), dtype), states


def parse_mamba(fields: Fields, layers: int, size: int, channels: int) -> MambaConfig:
    """Parse the Mamba 1 layers of a model without others, of a hidden `size`. Raise ModelError."""
    rank = -(-size // 16)
    if fields.values.get("time_step_rank") != "auto":
        rank = fields.count("time_step_rank", rank)
    return MambaConfig(
        layers=frozenset(range(layers)),
        channels=channels,
        state_dim=fields.count("mamba_d_state", 16),
        step_rank=rank,
        taps=fields.count("mamba_d_conv", 4, least=2),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias"),
    )


def mamba_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Return the Mamba 2 layers of `layer_types`, by default all. Raise ModelError."""
    if not fields.has("layer_types"):
        return frozenset(range(layers))
    kinds = fields.kinds("layer_types", (*MAMBA_KINDS, *ATTENTION_KINDS), layers)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind in MAMBA_KINDS)


def parse_mamba2(fields: Fields, layers: frozenset[int], inner: int, norm_eps: float) -> Mamba2Config:
    """Parse Mamba 2 layers whose heads have `inner` elements together. Raise ModelError."""
    heads, groups = fields.count("mamba_n_heads", 128), fields.count("mamba_n_groups", 1)
    size, bias = fields.values.get("mamba_d_head"), fields.flag("mamba_proj_bias")
    if inner % heads or size not in (None, "auto", inner // heads):
        raise wrong("mamba_d_head", f"{size!r} in {heads} heads is not the size {inner}")
    if heads % groups:
        raise wrong("mamba_n_groups", f"{groups} does not divide the {heads} heads")
    return Mamba2Config(
        layers=layers,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=fields.count("mamba_d_state", 256),
        taps=fields.count("mamba_d_conv", 4, least=2),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        output_bias=bias,
        norm_eps=norm_eps,
        time_step=_time_step(fields.values.get("time_step_limit")),
    )


def _time_step(limits: object) -> tuple[float, float]:
    """Return the limits of the time step, by default none."""
    if limits is None:
        return 0.0, math.inf
    pair = [math.inf if each == INFINITY else each for each in limits] if isinstance(limits, list) else []
    if len(pair) != 2 or any(type(each) not in (int, float) for each in pair) or not 0 <= pair[0] < pair[1]:
        raise wrong("time_step_limit", f"{limits!r} is not an interval")
    return float(pair[0]), float(pair[1])
