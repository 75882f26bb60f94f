"""Every Triton kernel becomes machine code for sm80 and sm90, as it would be launched, on any machine."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are compiled by triton")

from packages.kernels.tests.forks import Forks
from tercet.kernels.tools.compiling import Compiled, compile_case
from tercet.kernels.tools.launch_specs import CASES

ARCHITECTURES = (80, 90)
LINE = re.compile(
    r".* sm\d\d \w+ +\d{4,} bytes, +\d+ shared, +\d+ registers, +(?P<spilled>\d+) spilled, "
    r"+(?P<instructions>\d+) instructions ok"
)
RESOURCES = json.loads(Path(__file__).with_name("resources.json").read_text(encoding="utf-8"))
"""The most instructions of a kernel of each case, and bytes that a thread spills, by Triton 3.7 for sm80 and sm90.

`tercet-kernels compile` prints them. A kernel may have a quarter more. Cases that are not there have no bound.
"""
KERNELS = Path(__file__).parents[2] / "src" / "tercet" / "kernels" / "triton"


class Compiler:
    """`tercet-kernels compile` in a process of its own, for this one may hold interpreted kernels."""

    def __init__(self, architecture: int, cases: list[str]) -> None:
        self.lines: list[str] = []
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "tercet.kernels", "compile", "--architecture", str(architecture)]
        self.process = subprocess.Popen(
            [*command, "--case", *cases], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    def of(self, case: str, architecture: int) -> list[str]:
        """The lines of a case, when the compiler is past it."""
        assert self.process.stdout is not None
        start = f"{case:26} sm{architecture} "
        mine = [line for line in self.lines if line.startswith(start)]
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                mine.append(self.lines[-1])
            elif mine:
                break
        return mine

    def rest(self) -> list[str]:
        assert self.process.stdout is not None
        self.lines += [line.rstrip("\n") for line in self.process.stdout]
        return self.lines


Compilers = dict[int, Compiler]


@pytest.fixture(scope="module")
def compilers(request: pytest.FixtureRequest) -> Iterator[Compilers]:
    """Yield a compiler for each architecture, of the cases that are tested in this run."""
    cases = dict[int, list[str]]()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_a_case_compiles":
            params: dict[str, Any] = item.callspec.params
            cases.setdefault(params["architecture"], []).append(params["case"])
    started = {architecture: Compiler(architecture, names) for architecture, names in cases.items()}
    yield started
    for compiler in started.values():
        compiler.process.kill()
        compiler.process.communicate()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_case_compiles(compilers: Compilers, case: str, architecture: int) -> None:
    compiler = compilers[architecture]
    lines = compiler.of(case, architecture)
    assert lines, "\n".join(compiler.rest()[-20:])
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        for name, most in RESOURCES.get(case, {}).items():
            assert int(found[name]) <= most * 5 // 4, line


def test_every_kernel_is_covered(compilers: Compilers) -> None:
    kernels = set()
    for path in KERNELS.rglob("*.py"):
        kernels |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    lines = [line for compiler in compilers.values() for line in compiler.rest()]
    assert kernels == {line[len(f"{'':26} sm80 ") :].split()[0] for line in lines}
    assert not any(compiler.process.wait() for compiler in compilers.values())


LAUNCHED = """
import torch
from triton.backends.compiler import GPUTarget
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.tools import compiling
from tercet.kernels.tools import launch_specs as launches
from tercet.kernels.triton.sampling import sampling

seen = set()

def take(fn, compile, **_):
    seen.add((fn.jit_function.fn.__name__, *(str(compile[key]) for key in ("signature", "configs", "constants"))))
    return True

with compiling._launches_go_to(take, compiling.CompileTarget(GPUTarget("cuda", 90, 32))):
{steps}
print(*sorted(name for name, *_ in seen))
"""

ATTENDS = """
    for rows, length in ((1, 300), (1, 600), (1, 1000), (1, 5000), (2, 600), (9, 1024), (9, 1000), (16, 600)):
        launches._attention([(1, length)] * rows)
        launches._rope_decode([(1, length)] * rows)
        launches._attention([(length // 2, length)] * rows)
        launches._latent([(1, length)] * rows)
        launches._latent([(length // 2, length)] * rows)
"""

ANYWHERE = """
    from dataclasses import replace
    make_batch = launches.make_batch

    def shifted(x, places):
        return torch.zeros(x.numel() + places, dtype=x.dtype)[places:].view(x.shape)

    for places in (0, 1, 2):
        def make(*given):
            batch = make_batch(*given)
            names = ("kv_lens", "page_table", "slot_mapping", "query_start")
            return replace(batch, **{name: shifted(getattr(batch, name), places) for name in names})

        launches.make_batch = make
        launches._rope_decode([(1, 300)] * 9)
        launches._attention([(100, 300)] * 2)
        heads = torch.zeros(4, 48, 128, dtype=torch.bfloat16).split([32, 8, 8], 1)
        cache, index = torch.zeros(2, 16, 8, 128, dtype=torch.bfloat16), shifted(torch.arange(4), places)
        launches.rope.rope_store(*heads, index, torch.zeros(64, 128), cache, cache, index)
"""

DRAWS = """
    for rows in (1, 2, 3, 16, 17):
        logits = torch.zeros(rows, launches.VOCAB, dtype=torch.bfloat16)
        temperature, top_p, min_p = torch.ones(3, rows).unbind()
        top_k, *words = torch.ones(5, rows, dtype=torch.int64).unbind()
        for filters in (None, Filters(top_k, top_p, min_p)):
            sampling.sample(logits, temperature, filters, NoiseKey(*words))
"""


NORMS = """
    from tercet.kernels.triton.embedding import embedding
    from tercet.kernels.triton.rmsnorm import add_rmsnorm, rmsnorm

    for rows in (1, 2, 3, 16, 17):
        hidden = launches._hidden(rows)
        add_rmsnorm(hidden, hidden, hidden[0], 1e-5)
    for place in (0, 1):
        embedding(torch.zeros(5, dtype=torch.int64)[place:], hidden)
"""


PRODUCTS = """
    for rows in (1, 2, 15, 16, 65, 100, 512, 1000):
        for kind in ("fp8", "int4"):
            launches._quantized(kind, rows, (1, 128))
    for tokens in (1, 3, 8, 16, 1000, 1024):
        launches._moe(tokens, "fp8")
"""


ADAPTS = """
    from tercet.kernels.ops.lora import LoRARows, LoRAWeights
    from tercet.kernels.triton.linear.lora import add_lora

    weights = LoRAWeights(torch.zeros(2, 48, 4096), torch.zeros(2, 16, 6144), launches.QKV)
    for runs in (1, 2, 3, 10, 16, 17, 100):
        for place in (0, 1):
            table = torch.zeros(3 * runs + place, dtype=torch.int32)[place:].view(runs, 3)
            for longest in (1, 16, 17, 64):
                rows = LoRARows((), table, (), longest, table.view(-1)[place:])
                add_lora(torch.zeros(runs, 6144), torch.zeros(runs, 4096), weights, rows)
"""


def compiled(compiling: Forks, steps: str) -> list[str]:
    """A kernel's name as often as steps have it compiled, in a process of its own."""
    return compiling.run("-c", LAUNCHED.replace("{steps}", steps)).stdout.split()


def machine_code(compiling: Forks, kernel: str, architecture: int) -> list[str]:
    """The lines of a kernel of `machine_code.py`."""
    script = Path(__file__).with_name("machine_code.py")
    return compiling.run(str(script), kernel, str(architecture)).stdout.splitlines()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_split_counts_as_ended_when_all_of_its_threads_have_stored(compiling: Forks, architecture: int) -> None:
    """One thread counts. Triton itself has the others wait for it only where they share memory besides."""
    lines = machine_code(compiling, "counted_kernel", architecture)
    counted = next(place for place, line in enumerate(lines) if "atom.global" in line)
    stored = max(place for place in range(counted) if "st.global" in lines[place])
    assert any("bar.sync" in line for line in lines[stored:counted])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nan_stays_nan_through_a_clamp(compiling: Forks, architecture: int) -> None:
    """Of a number and none an instruction for both gives the number, where an interpreter's numpy does not."""
    code = "\n".join(machine_code(compiling, "clamped_kernel", architecture))
    limits = re.findall(r"\b(?:min|max)\.(?!s32|u32)\S*", code)
    assert {"min.NaN.f32", "max.NaN.f32"} <= set(limits)
    assert all("NaN" in limit for limit in limits)


def test_attention_of_other_lengths_and_rows_compiles_nothing_again(compiling: Forks) -> None:
    names = [name for name in compiled(compiling, ATTENDS) if name != "merge_kernel"]
    decodes, latent = ["decode_kernel"] * 3, ["latent_decode_kernel"] * 2
    wanted = [*decodes, "extend_kernel", *latent, "latent_extend_kernel", *["rope_decode_kernel"] * 3]
    assert names == wanted, "one split, a few and many; latent vectors of so few rows are always split"


def test_attention_of_numbers_that_lie_elsewhere_compile_nothing_again(compiling: Forks) -> None:
    """A step's numbers are parts of one buffer, some of them on no boundary of 16 bytes."""
    assert compiled(compiling, ANYWHERE) == ["extend_kernel", "rope_decode_kernel", "rope_store_kernel"]


def test_norms_and_embeddings_compile_once_for_all_row_counts(compiling: Forks) -> None:
    assert compiled(compiling, NORMS) == ["embedding_kernel", "rmsnorm_kernel"]


def test_draws_of_other_numbers_of_rows_compile_nothing_again(compiling: Forks) -> None:
    names = ["choose_kernel", "collect_kernel", "cut_kernel", "score_bounds_kernel", "winner_kernel"]
    assert compiled(compiling, DRAWS) == names


def test_products_of_other_numbers_of_rows_compile_nothing_again(compiling: Forks) -> None:
    names = [name for name in compiled(compiling, PRODUCTS) if name != "gated_kernel"]
    expected = {"add_splits_kernel": 1, "assign_rows_kernel": 3, "count_pairs_kernel": 1, "dequantize_kernel": 3}
    expected |= {"grouped_gemm_kernel": 6, "quantized_linear_kernel": 3, "quantized_gemv_kernel": 2}
    expected |= {"scaled_experts_up_kernel": 1, "scaled_experts_down_kernel": 1}
    assert Counter(names) == expected, (
        "of every kind, and for few and for many rows; those in int4, and experts of many rows, are unpacked first"
    )


def test_adapters_of_other_runs_compile_nothing_again(compiling: Forks) -> None:
    """However many splits there are, and wherever in a step's numbers the table lies; of prompts they are others."""
    assert compiled(compiling, ADAPTS) == [*["lora_expand_kernel"] * 2, *["lora_shrink_kernel"] * 2]


def trouble(compiling: Forks, case: str, architecture: int) -> str:
    """What is wrong with a case, or is said of it that is never launched."""
    steps = f"""
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.tools.compiling import compile_case
try:
    print(*[each.trouble or "ok" for each in compile_case({case!r}, {architecture})])
except UnavailableBackendError as error:
    print(error)
"""
    return compiling.run("-c", steps).stdout.strip()


@pytest.mark.parametrize("case", ["extend", "extend float32", "extend head 256, float32"])
def test_attention_is_cut_up_so_that_a_gpu_with_little_memory_has_room(compiling: Forks, case: str) -> None:
    """The tiles of servers' GPUs would not be launched there."""
    assert trouble(compiling, case, 86) == "ok"


@pytest.mark.parametrize("case", ["decode fp8", "int4, many rows", "moe, fp8"])
@pytest.mark.parametrize("architecture", [103, 120])
def test_the_newest_gpus_have_kernels(compiling: Forks, case: str, architecture: int) -> None:
    """Machine code of data-center and workstation GPUs comes from different compilers."""
    assert {*trouble(compiling, case, architecture).split()} == {"ok"}


def test_tensor_cores_of_workstation_gpus_read_registers_also_with_pdl(compiling: Forks) -> None:
    steps = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tercet.kernels.triton import launch
from tercet.kernels.tools import compiling
for architecture in (80, 90, 100, 120):
    driver.set_active(compiling.CompileTarget(GPUTarget("cuda", architecture, 32)))
    here = torch.device("cpu")
    print(architecture, launch.pdl_options(here)["PDL"], launch.multiplies_from_memory(here))
"""
    said = ["80 False False", "90 True True", "100 True True", "120 True False"]
    assert compiling.run("-c", steps).stdout.splitlines() == said


def test_float32_latent_attention_compiles_where_it_is_launched(compiling: Forks) -> None:
    assert "bytes of shared memory for vectors in float32, of 101376" in trouble(compiling, "latent extend float32", 89)
    assert trouble(compiling, "latent extend float32", 103) == "ok"


def test_too_much_shared_memory_is_reported() -> None:
    assert Compiled("x", "k", 80, 5000, 200_000).trouble == "200000 bytes of shared memory, of 166912"
    assert Compiled("x", "k", 90, 5000, 200_000).trouble == ""
    assert Compiled("x", "k", 90, 0, 0).trouble == "no machine code"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here")
def test_interpreted_kernels_cannot_be_compiled() -> None:
    with pytest.raises(RuntimeError, match="without TRITON_INTERPRET"):
        compile_case("decode", 90)
