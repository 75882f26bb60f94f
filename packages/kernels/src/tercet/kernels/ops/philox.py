"""Sampling noise as a pure function: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

key = (low, high) words of a 64-bit seed; counter = (choice index, output position, token id, 0). The first output word
x gives the uniform u = the float32 nearest to (x + 0.5) / 2**32, but at most 1 - 2**-24, so 0 < u < 1; and u gives the
Gumbel noise g = -log(-log(1 - u)), computed in float64 and rounded to float32. The formula uses 1 - u, not u, so that
large values of g, which decide the winner, come from small values of u, where float32 is fine-grained.

Every backend returns these same numbers; there is no generator state.
"""

import math
import struct
from dataclasses import dataclass

import torch

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10
BLOCK = 1 << 14
"""Numbers computed at a time, so that temporaries stay in a core's cache."""

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
"""Upper bound of the noise: a token this far below another's score cannot win."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class NoiseKey:
    """Key of the noise of each row, without the token: int64 [rows], each a 32-bit word."""

    seed_low: torch.Tensor
    seed_high: torch.Tensor
    choice: torch.Tensor
    position: torch.Tensor

    def rows(self, index: torch.Tensor) -> "NoiseKey":
        """Return the keys of some rows."""
        return NoiseKey(self.seed_low[index], self.seed_high[index], self.choice[index], self.position[index])


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Compute ten rounds of Philox on 32-bit words in int64 tensors, which broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):  # int64 wraps around like uint64; c1, c3 and the key are masked to 32 bits at the end
        left, right = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0 = ((right >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((left >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = right, left
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1 & _WORD, c2, c3 & _WORD


def uniform(key: NoiseKey, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 in (0, 1) for each entry of `key` and `tokens`, which broadcast."""
    words = philox4x32((key.choice, key.position, tokens, torch.zeros_like(tokens)), (key.seed_low, key.seed_high))
    return unit_interval(words[0])


def unit_interval(words: torch.Tensor) -> torch.Tensor:
    """Convert output words (int64, 32 bits) to uniforms: float32 in (0, 1)."""
    return ((words.double() + 0.5) * 2.0**-32).float().clamp_(max=1 - 2.0**-24)


def gumbel(key: NoiseKey, rows: torch.Tensor, tokens: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [n], of token `tokens[i]` in row `rows[i]` of `key`."""
    noise = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    for first in range(0, len(tokens), size):
        block = slice(first, first + size)
        noise[block] = -torch.log(-torch.log1p(-uniform(key.rows(rows[block]), tokens[block]).double()))
    return noise


def philox4x32_reference(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute ten rounds of Philox in Python integers, as in the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform_reference(seed: int, choice: int, position: int, token: int) -> float:
    """Compute `uniform` of one token in Python integers and floats."""
    word = philox4x32_reference((choice, position, token, 0), (seed & _WORD, seed >> 32))[0]
    return min(_float32((word + 0.5) * 2.0**-32), 1 - 2.0**-24)


def gumbel_reference(seed: int, choice: int, position: int, token: int) -> float:
    """Compute `gumbel` of one token in Python integers and floats."""
    return _float32(-math.log(-math.log1p(-uniform_reference(seed, choice, position, token))))


def _float32(value: float) -> float:
    """Round to the nearest float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
