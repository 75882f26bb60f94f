"""Operations of the sampler in plain torch. Modules of faster operations have the same names and results."""

from tercet.kernels.ops.bitmask import apply_bitmask_
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.kernels.ops.penalties import apply_penalties_
from tercet.kernels.ops.sampling import greedy, sample

__all__ = ["apply_bitmask_", "apply_penalties_", "greedy", "sample", "token_logprobs"]
