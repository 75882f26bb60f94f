"""What is read most is read by whole vectors, and ahead: as machine code for sm90 has it, on any machine."""

import json
from pathlib import Path
from typing import Any

import pytest

from packages.kernels.tests.forks import Forks

pytest.importorskip("triton", reason="the kernels are compiled by triton")

WIDE = [
    ("rope decode", "rope_decode_kernel", "k = tl.load(k_ptr", 16),
    ("rope decode", "rope_decode_kernel", "v = tl.load(v_ptr", 16),
    ("latent decode", "latent_decode_kernel", "latent = tl.load(at", 16),
    ("linear of one row", "gemv_kernel", "weight = tl.load(at", 16),
    ("int4, one row", "quantized_gemv_kernel", "soon = tl.load(words_at", 8),
    ("fp8 blocks", "quantized_linear_kernel", "codes = tl.load(at", 16),
    ("fp8 rows, many outputs", "quantized_linear_kernel", "codes = tl.load(at", 16),
    ("fp8 blocks", "add_splits_kernel", "total += tl.load(", 16),
    ("mxfp4", "quantized_linear_kernel", "codes = tl.load(codes_at", 8),
    ("moe, mxfp4, few", "experts_up_kernel", "soon = tl.load(words_at", 16),
    ("moe, mxfp4, few", "experts_down_kernel", "soon = tl.load(words_at", 16),
    ("moe, few", "full_experts_up_kernel", "weight = tl.load(weight_at", 16),
    ("moe, few of many experts", "full_experts_down_kernel", "weight = tl.load(weight_at", 16),
    ("lora of prompts", "lora_shrink_kernel", "a = tl.load(a_at", 16),
    ("lora of prompts", "lora_shrink_kernel", "x = tl.load(x_at", 16),
    ("lora of prompts", "lora_expand_kernel", "b = tl.load(b_at", 16),
    ("add_rmsnorm", "rmsnorm_kernel", "x = tl.load(x_at", 16),
    ("add_rmsnorm", "rmsnorm_kernel", "tl.store(out_ptr", 16),
    ("silu_and_mul", "gated_kernel", "gate = tl.load(", 16),
    ("largest", "best_of_block_kernel", "logits = tl.load(", 16),
]
"""(case, kernel, how a line of its source begins, bytes that a thread reads or writes there at once)

Groups of 8 bytes are what `quantised_row` is made for; codes of two in a byte lie in shared memory by 8.
"""

COPIED = [
    ("rope decode", "rope_decode_kernel", "k = tl.load(k_ptr"),
    ("rope decode", "rope_decode_kernel", "v = tl.load(v_ptr"),
    ("latent decode", "latent_decode_kernel", "latent = tl.load(at"),
    ("lora of prompts", "lora_shrink_kernel", "a = tl.load(a_at"),
    ("lora of prompts", "lora_shrink_kernel", "x = tl.load(x_at"),
    ("fp8 blocks", "quantized_linear_kernel", "codes = tl.load(at"),
    ("mxfp4", "quantized_linear_kernel", "codes = tl.load(codes_at"),
]
"""What loops leave to copies on the side."""

AHEAD = [
    ("int4, one row", "quantized_gemv_kernel", "zero_soon = tl.load("),
    ("fp8 blocks", "quantized_linear_kernel", "scale = tl.load(scales_at"),
    ("mxfp4", "quantized_linear_kernel", "soon = tl.load(scales_at"),
]
"""What loops load for the time after: first before they begin."""


@pytest.fixture(scope="module")
def accesses(compiling: Forks) -> list[dict[str, Any]]:
    """Return every `MemoryAccess`, read in a process of its own, as this one may hold interpreted kernels."""
    script, cases = Path(__file__).with_name("memory_access.py"), dict.fromkeys(case for case, *_ in WIDE)
    return [json.loads(line) for line in compiling.run(str(script), "90", *cases).stdout.splitlines()]


def at(accesses: list[dict[str, Any]], case: str, kernel: str, line: str) -> list[dict[str, Any]]:
    """Those of a line, of which there are some."""
    mine = [each for each in accesses if (each["case"], each["kernel"]) == (case, kernel)]
    found = [each for each in mine if each["source"].startswith(line)]
    assert found, sorted({each["source"] for each in mine})
    return found


@pytest.mark.parametrize(("case", "kernel", "line", "size"), WIDE)
def test_memory_accesses_are_vectorized(
    accesses: list[dict[str, Any]], case: str, kernel: str, line: str, size: int
) -> None:
    """A stride or a mask that the compiler knows too little of makes them a number each."""
    assert {each["size"] for each in at(accesses, case, kernel, line)} == {size}


@pytest.mark.parametrize(("case", "kernel", "line"), COPIED)
def test_a_loop_does_not_load_what_it_can_have_copied(
    accesses: list[dict[str, Any]], case: str, kernel: str, line: str
) -> None:
    looped = [each["kind"] for each in at(accesses, case, kernel, line) if each["looped"]]
    assert {*looped} == {"copy"}


@pytest.mark.parametrize(("case", "kernel", "line"), AHEAD)
def test_a_loop_does_not_wait_for_scales(accesses: list[dict[str, Any]], case: str, kernel: str, line: str) -> None:
    assert {each["looped"] for each in at(accesses, case, kernel, line)} == {False, True}
