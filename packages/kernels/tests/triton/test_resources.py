"""Machine code of kernels that no GPU has run, on newer architectures, too: they spill nothing, and stay short.

`test_compiling` bounds every kernel on sm80 and sm90. The bounds here are a fifth above what Triton 3.7 compiles, so
that a change of a kernel that makes it much longer is seen.
"""

import json

import pytest

pytest.importorskip("triton", reason="the kernels are compiled by triton")

from packages.kernels.tests.forks import Forks

ARCHITECTURES = (80, 90, 100, 120)

INSTRUCTIONS = {
    "round rows": 600,
    "round wide rows": 1600,
    "round rows in blocks": 570,
    "round normed rows, int8": 680,
    "scale sums, int8, a bias": 135,
    "moe, long prefill": 1250,
    "moe, mxfp4, prefill": 1600,
    "int4, turned": 1400,
    "int4, turned, 128 rows": 1600,
    "linear of an adapted row": 1550,
    "moe, fp8, few": 740,
    "moe, int4, few": 860,
    "sample": 1650,
    "sample, filters": 4700,
}
"""Most instructions of any kernel of a case, on any of the architectures."""

RESOURCES = """
import json, sys
from tercet.kernels.tools.compiling import compile_case, resources_of
for case in {cases!r}:
    for kernel in compile_case(case, {architecture}):
        found = resources_of(kernel.machine_code)
        print(json.dumps([case, kernel.kernel, found.registers, found.spilled, found.instructions]))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_spill_nothing_and_stay_short(compiling: Forks, architecture: int) -> None:
    steps = RESOURCES.format(cases=[*INSTRUCTIONS], architecture=architecture)
    found = [json.loads(line) for line in compiling.run("-c", steps).stdout.splitlines()]
    assert {case for case, *_ in found} == INSTRUCTIONS.keys()
    for case, kernel, registers, spilled, instructions in found:
        assert spilled == 0, (case, kernel, registers)
        assert 0 < instructions <= INSTRUCTIONS[case], (case, kernel)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_whose_keys_decay_by_channel_spill_little(compiling: Forks, architecture: int) -> None:
    steps = RESOURCES.format(cases=["delta prompts by channel"], architecture=architecture)
    lines = map(json.loads, compiling.run("-c", steps).stdout.splitlines())
    found = {kernel: (spilled, length) for _, kernel, _, spilled, length in lines}
    most = {
        "delta_pairs_kernel": (200, 4400),
        "delta_chunk_kernel": (160, 7900),
        "delta_states_kernel": (1210, 8200),
    }
    assert found.keys() == most.keys()
    for kernel, (spilled, instructions) in found.items():
        assert (spilled <= most[kernel][0], instructions <= most[kernel][1]) == (True, True), (kernel, found)


PROMPTS = {"extend": 4350, "extend 64 x 8 x 3": 2200, "extend 128 x 8 x 2": 3250}
"""Most instructions of prompts on sm90, whose loops have no scale and, before the diagonal, no mask."""


def test_prompts_stay_short_and_those_of_eight_warps_spill_nothing(compiling: Forks) -> None:
    found = compiling.run("-c", RESOURCES.format(cases=[*PROMPTS], architecture=90)).stdout.splitlines()
    resources = {case: (spilled, size) for case, _, _, spilled, size in map(json.loads, found)}
    assert resources.keys() == PROMPTS.keys()
    for case, (spilled, size) in resources.items():
        assert 0 < size <= PROMPTS[case], case
        assert spilled == 0 or case == "extend", case
