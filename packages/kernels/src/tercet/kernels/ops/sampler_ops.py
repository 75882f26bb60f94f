"""What a sampler takes of plain torch, in one place: faster operations have these names and do the same."""

from tercet.kernels.ops.bitmask import apply_bitmask_
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.kernels.ops.penalties import apply_penalties_
from tercet.kernels.ops.sampling import likeliest, sample

__all__ = ["apply_bitmask_", "apply_penalties_", "likeliest", "sample", "token_logprobs"]
