"""Operations of the sampler as Triton kernels, with the names of `tercet.kernels.ops.sampler_ops`."""

from tercet.kernels.triton.sampling.argmax import greedy
from tercet.kernels.triton.sampling.bitmask import apply_bitmask_
from tercet.kernels.triton.sampling.logprobs import token_logprobs
from tercet.kernels.triton.sampling.penalties import apply_penalties_
from tercet.kernels.triton.sampling.sampling import sample

__all__ = ["apply_bitmask_", "apply_penalties_", "greedy", "sample", "token_logprobs"]
