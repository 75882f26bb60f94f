"""Rotary position embedding (https://arxiv.org/abs/2104.09864), rotating halves as in GPT-NeoX and Llama.

Frequencies, cosines and sines are computed in the order of operations of transformers, so that they are bitwise equal
in float32.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of frequencies beyond the trained context length. Names are those of config.json.

    `type` is one of `ROPE_TYPES`; each uses only the fields that transformers reads for it. dynamic changes frequencies
    beyond `max_position_embeddings` only, which no request may reach, and longrope beyond
    `original_max_position_embeddings`: see `inverse_frequencies`.
    """

    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """longrope: divisors of the frequency of each pair."""


ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None = None, *, length: int = 0
) -> tuple[torch.Tensor, float]:
    """Return (frequencies float32 [rotary_dim / 2], the factor of cos and sin).

    dynamic is exact for positions below `max_position_embeddings` only: a longer sequence would change the frequencies
    of keys already cached. For the same reason longrope, which transformers switches from short to long factors with
    the length of each batch, has one kind for all sequences: short factors if a model serves a `length` of at most
    `original_max_position_embeddings`, otherwise long ones. Raises ValueError for an unknown type.
    """
    scaling = scaling or RopeScaling()
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float) / rotary_dim
    match scaling.type:
        case "default":
            return 1.0 / (theta**exponent), 1.0
        case "dynamic":
            stretch = (scaling.factor - (scaling.factor - 1)) ** (rotary_dim / (rotary_dim - 2))
            return 1.0 / ((theta * stretch) ** exponent), 1.0
        case "linear":
            return 1.0 / (theta**exponent) / scaling.factor, 1.0
        case "llama3":
            return _llama3(1.0 / (theta**exponent), scaling), 1.0
        case "yarn":
            return _yarn(theta**exponent, rotary_dim, theta, scaling), _yarn_attention_factor(scaling)
        case "longrope":
            served_long = length > scaling.original_max_position_embeddings
            factors = torch.tensor(scaling.long_factor if served_long else scaling.short_factor, dtype=torch.float32)
            return 1.0 / (factors * theta**exponent), _longrope_attention_factor(scaling)
    raise ValueError(f"rope type {scaling.type!r} is not one of {', '.join(ROPE_TYPES)}")


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones and interpolate between them (Llama 3.1)."""
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / scaling.low_freq_factor, inv_freq / scaling.factor, inv_freq)
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    short = wavelength < context / scaling.high_freq_factor
    long = wavelength > context / scaling.low_freq_factor
    return torch.where(~short & ~long, smoothed, scaled)


def _yarn(freqs: torch.Tensor, rotary_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Blend extrapolation and interpolation by a ramp over dimensions (https://arxiv.org/abs/2309.00071)."""
    context = scaling.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        return (rotary_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (scaling.factor * freqs) * (1 - extrapolated) + 1.0 / freqs * extrapolated


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    """Return the factor of https://arxiv.org/abs/2402.13753, the same for short and long factors."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))


def rope_cache(positions: int, rotary_dim: int, theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Return cosines and sines of positions 0, 1, ...: float32 [positions, rotary_dim], cosines in the first half.

    `positions` is the length that a model serves, by which longrope selects its factors: see `inverse_frequencies`. The
    table is computed on the CPU, so that it is equal for every device, and returned on torch's current default device.
    """
    with torch.device("cpu"):
        inv_freq, factor = inverse_frequencies(rotary_dim, theta, scaling, length=positions)
        angles = torch.arange(positions).float()[:, None] * inv_freq
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
    return table.to(torch.get_default_device())


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k [tokens, heads, head_dim] to their positions [tokens]; returns new tensors of the same dtype.

    Only the first `cache.shape[1]` elements of each head are rotated. As in transformers, cosines and sines are rounded
    to q's dtype before use.
    """
    cos, sin = cache[positions].to(q.dtype)[:, None].chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
