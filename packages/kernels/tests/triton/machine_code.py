# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""What kernels become on a GPU where an interpreter cannot show it: run by itself, it writes PTX."""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from tercet.kernels.triton.activation import gated
from tercet.kernels.triton.attention.paged_attention import merge_if_last


@triton.jit
def counted_kernel(parts_ptr, lse_ptr, merged_ptr, finished_ptr, SIZE: tl.constexpr):  # noqa: N803
    """A split that ends right after every thread has stored what it has, in place."""
    head, dim = tl.arange(0, 1), tl.arange(0, SIZE)
    place = tl.program_id(0) * 4 + tl.program_id(1) + head
    tl.store(parts_ptr + place[:, None] * SIZE + dim[None, :], tl.full([1, SIZE], 1.0, tl.float32))
    mine = (head < 1)[:, None] & (dim < SIZE)[None, :]
    sink = tl.full([1], float("-inf"), tl.float32)
    row = tl.program_id(0) + head
    merge_if_last(finished_ptr, parts_ptr, lse_ptr, merged_ptr, row, row * 4, 1, 4, sink, mine, SIZE)


@triton.jit
def clamped_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):  # noqa: N803
    """A clamped gate and up."""
    at = tl.arange(0, SIZE)
    gate, up = tl.load(x_ptr + at), tl.load(x_ptr + SIZE + at)
    tl.store(out_ptr + at, gated(gate, up, "clamped", tl.float32))


_POINTERS = {
    "counted_kernel": {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "merged_ptr": "*fp32", "finished_ptr": "*i32"},
    "clamped_kernel": {"x_ptr": "*fp32", "out_ptr": "*fp32"},
}

if __name__ == "__main__":
    source = ASTSource(globals()[sys.argv[1]], _POINTERS[sys.argv[1]] | {"SIZE": "constexpr"}, {"SIZE": 256})
    sys.stdout.write(compile_source(source, target=GPUTarget("cuda", int(sys.argv[2]), 32)).asm["ptx"])
