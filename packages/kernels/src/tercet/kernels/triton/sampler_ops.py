"""What a sampler takes of these kernels, in one place: as `tercet.kernels.ops.sampling` is for plain torch."""

from tercet.kernels.triton.bitmask import apply_bitmask_
from tercet.kernels.triton.largest import largest
from tercet.kernels.triton.sampling import sample

__all__ = ["apply_bitmask_", "largest", "sample"]
