"""Native versions of the operations of `tercet.kernels.ops`, with the same names and semantics.

Tensors are float32 or bfloat16 on the CPU. bfloat16 results are rounded once, at the end of an operation.
"""

import math

import torch

from tercet.kernels.native.abi import FORMATS, Filter
from tercet.kernels.native.library import Library
from tercet.kernels.ops import philox
from tercet.kernels.ops.penalties import Penalties, TokenCounts
from tercet.kernels.ops.sampling import Filters, mask_non_finite


class NativeOps:
    """Operations of one loaded library."""

    def __init__(self, library: Library) -> None:
        self._call = library.functions

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `tercet.kernels.ops.rmsnorm.rmsnorm`."""
        x, weight = _given(x), _given(weight, None, (x.shape[-1],))
        out = torch.empty_like(x)
        pointers = x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None
        self._call.rmsnorm(*pointers, *_rows(x), eps, _format(x), _format(weight))
        return out

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tercet.kernels.ops.rmsnorm.add_rmsnorm`."""
        x, residual, weight = _given(x), _given(residual, x.dtype, x.shape), _given(weight, None, (x.shape[-1],))
        out, total = torch.empty_like(x), torch.empty_like(x)
        pointers = (tensor.data_ptr() for tensor in (x, residual, weight, out, total))
        self._call.rmsnorm(*pointers, *_rows(x), eps, _format(x), _format(weight))
        return out, total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `tercet.kernels.ops.activation.silu_and_mul`."""
        x = _given(x)
        if x.shape[-1] % 2:
            raise ValueError("gate and up must be of one size")
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        self._call.silu_and_mul(x.data_ptr(), out.data_ptr(), *_rows(out), _format(x))
        return out

    def apply_rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k, which may be views of a wider row."""
        positions, cache = _given(positions, torch.int64, (len(q),)), _given(cache, torch.float32)
        _check_indices(positions, len(cache), "a position")
        return self._rotate(q, positions, cache), self._rotate(k, positions, cache)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        tokens, heads, head_dim = x.shape
        if x.stride()[1:] != (head_dim, 1):
            x = x.contiguous()
        if cache.shape[1] > head_dim:
            raise ValueError("the table is wider than a head")
        out = x.new_empty(x.shape)
        given = (x.data_ptr(), x.stride(0), out.data_ptr(), positions.data_ptr(), cache.data_ptr(), cache.shape[1])
        self._call.rope(*given, tokens, heads, head_dim, _format(x))
        return out

    def argmax_with_values(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `tercet.kernels.ops.sampling.argmax_with_values`."""
        logits = _given(logits, torch.float32)
        rows, vocab = logits.shape
        most, index = logits.new_empty(rows), torch.empty(rows, dtype=torch.int64)
        if not vocab:
            raise ValueError("nothing is largest of nothing")
        self._call.argmax(logits.data_ptr(), rows, vocab, most.data_ptr(), index.data_ptr())
        return most, index

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """See `tercet.kernels.ops.sampling.greedy`."""
        return mask_non_finite(*self.argmax_with_values(logits))

    def apply_bitmask_(self, logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
        """See `tercet.kernels.ops.bitmask.apply_bitmask_`."""
        if not logits.is_contiguous():
            raise ValueError("logits that are masked in place must be contiguous")
        logits = _given(logits, torch.float32)
        rows, vocab = logits.shape
        bitmask = _given(bitmask, torch.int32)
        if len(bitmask) != rows or bitmask.shape[1] * 32 < vocab:
            raise ValueError(f"a mask {list(bitmask.shape)} does not cover logits {list(logits.shape)}")
        self._call.apply_bitmask(logits.data_ptr(), rows, vocab, bitmask.data_ptr(), bitmask.shape[1])
        return logits

    def apply_penalties_(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        counts: TokenCounts,
        sequences: torch.Tensor,
        penalties: Penalties,
    ) -> None:
        """See `tercet.kernels.ops.penalties.apply_penalties_`."""
        if not logits.is_contiguous():
            raise ValueError("logits that are penalized in place must be contiguous")
        logits, (_, vocab) = _given(logits, torch.float32), logits.shape
        count, tables = len(rows), counts.output.shape
        output, prompt = _given(counts.output, torch.int32), _given(counts.prompt, torch.bool, tables)
        if tables[1] != vocab:
            raise ValueError(f"counts {list(tables)} are not of logits {list(logits.shape)}")
        rows, sequences = _given(rows, torch.int64), _given(sequences, torch.int64, (count,))
        _check_indices(rows, len(logits), "a row")
        _check_indices(sequences, len(output), "a sequence")
        strengths = (penalties.repetition, penalties.frequency, penalties.presence)
        given = (rows, sequences, output, prompt, *(_given(each, torch.float32, (count,)) for each in strengths))
        first, second, *others = (each.data_ptr() for each in given)
        self._call.penalize(logits.data_ptr(), vocab, first, second, count, *others)

    def token_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `tercet.kernels.ops.logprobs.token_logprobs`. Rows without a finite largest logit get any numbers."""
        logits, tokens = _given(logits, torch.float32), _given(tokens, torch.int64)
        count, vocab = len(tokens), logits.shape[1]
        _check_indices(tokens, vocab, "a token")
        if rows is not None:
            rows = _given(rows, torch.int64, (count,))
            _check_indices(rows, len(logits), "a row")
        elif count > len(logits):
            raise ValueError(f"{count} tokens of logits {list(logits.shape)}")
        top = min(top, vocab)
        chosen, ids, values = torch.empty(count), torch.empty(count, top, dtype=torch.int64), torch.empty(count, top)
        given = (logits.data_ptr(), vocab, None if rows is None else rows.data_ptr(), tokens.data_ptr(), count, top)
        self._call.token_logprobs(*given, chosen.data_ptr(), ids.data_ptr(), values.data_ptr())
        return chosen, ids, values

    def sample(
        self, logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: philox.NoiseKey
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.sampling.sample`."""
        logits = _given(logits, torch.float32)
        rows, vocab = logits.shape
        temperature, keys = _given(temperature, torch.float32, (rows,)), _noise_keys(noise)
        if not vocab or len(keys) != rows:
            raise ValueError(f"logits {list(logits.shape)} with noise for {len(keys)} rows")
        kept = [Filter(0, 1.0, -math.inf)] * rows
        if filters is not None:
            values = (filters.top_k, filters.top_p, filters.min_p.log())
            kept = [Filter(*row) for row in zip(*(value.tolist() for value in values), strict=True)]
        table, tokens = (Filter * rows)(*kept), torch.empty(rows, dtype=torch.int64)
        pointers = (temperature.data_ptr(), table, keys.data_ptr(), tokens.data_ptr())
        self._call.sample(logits.data_ptr(), rows, vocab, *pointers)
        return tokens

    def gumbel(self, key: philox.NoiseKey, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `tercet.kernels.ops.philox.gumbel`."""
        table = _noise_keys(key)
        rows, tokens = _given(rows, torch.int64), _given(tokens, torch.int64, rows.shape)
        _check_indices(rows, len(table), "the key of a row")
        out = torch.empty(len(rows))
        self._call.gumbel(table.data_ptr(), rows.data_ptr(), tokens.data_ptr(), len(rows), out.data_ptr())
        return out


def _given(x: torch.Tensor, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the tensor, contiguous. Raises for a device, dtype or shape that the library cannot take."""
    if x.device.type != "cpu":
        raise ValueError(f"a native operation was given a tensor on {x.device}")
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"expected {dtype}, not {x.dtype}")
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"expected shape {list(shape)}, not {list(x.shape)}")
    return x.contiguous()


def _check_indices(indices: torch.Tensor, size: int, of: str) -> None:
    """Raise IndexError for an index outside of [0, size)."""
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise IndexError(f"the index of {of} is not below {size}")


def _noise_keys(key: philox.NoiseKey) -> torch.Tensor:
    """Return `NoiseKey` of noise.h for each row."""
    words = (key.seed_low, key.seed_high, key.choice, key.position)
    return torch.stack([word.to(torch.int64) for word in words], 1).to(torch.uint32).contiguous()


def _format(x: torch.Tensor) -> int:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"native operations take float32 and bfloat16, not {x.dtype}")
    return FORMATS[x.dtype]


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Return (rows, elements of a row)."""
    return x.numel() // max(1, x.shape[-1]), x.shape[-1]
