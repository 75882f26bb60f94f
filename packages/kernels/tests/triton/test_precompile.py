"""Kernels compiled by worker processes for an absent GPU, and found by launches."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels are compiled by triton")

from packages.kernels.tests.forks import Forks

PROGRAM = """
import json, os, sys
from contextlib import suppress
from dataclasses import replace
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tercet.kernels.tools.launch_specs import _hidden
from tercet.kernels.triton import precompile
from tercet.kernels.triton.embedding import embedding
from tercet.kernels.triton.rmsnorm import add_rmsnorm

knobs.cache.dir = os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
sys.path.append(sys.argv[2])
os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[2], os.environ.get("PYTHONPATH", "")])
driver.set_active(precompile.CompileTarget(GPUTarget("cuda", 90, 32)))

def run():
    for rows in (1, 2):
        add_rmsnorm(_hidden(rows), _hidden(rows), _hidden()[0], 1e-5)
    embedding(torch.zeros(5, dtype=torch.int64), _hidden())

said = {}
with torch.inference_mode():
    with precompile.recorded() as kernels:
        run()
        said["zeros"] = not torch.empty(1000).any() and not _hidden().new_empty(1000).any()
    said["names"] = sorted(kernel.name for kernel in kernels)
    said["missing"] = len(precompile.missing(kernels))
    wrong = [replace(kernels[0], name="no_kernel"), replace(kernels[0], module="ends_worker")]
    reports = []
    said["failures"] = precompile.compile_all([*wrong[:1], *kernels, *wrong[1:]], 1, lambda *at: reports.append(at))
    said["reports"] = reports
    said["missing_then"] = len(precompile.missing(kernels))
    found = []
    knobs.compilation.listener = lambda src, cache_hit, **_: found.append((src.name, cache_hit))
    for rows in (1, 2):
        with suppress(AttributeError):  # of the stub driver, which loads nothing
            add_rmsnorm(_hidden(rows), _hidden(rows), _hidden()[0], 1e-5)
    with suppress(AttributeError):
        embedding(torch.zeros(5, dtype=torch.int64), _hidden())
    said["found"] = found
print(json.dumps(said))
"""


def test_launches_find_what_workers_have_compiled(compiling: Forks, tmp_path: Path) -> None:
    """A worker that a kernel ends, and a kernel that is none, are said, and stop no other."""
    (tmp_path / "ends_worker.py").write_text("import os\nos._exit(3)\n")
    said = json.loads(compiling.run("-c", PROGRAM, str(tmp_path / "cache"), str(tmp_path)).stdout)
    assert said["names"] == ["embedding_kernel", "rmsnorm_kernel"]
    assert said["zeros"]
    assert (said["missing"], said["missing_then"]) == (2, 0)
    assert len(said["failures"]) == 2
    assert said["failures"][0].startswith("no_kernel: AttributeError")
    assert said["failures"][1].endswith("its worker ended")
    assert said["reports"] == [[done, 4] for done in (1, 2, 3, 4)]
    assert sorted(said["found"]) == [["embedding_kernel", True], ["rmsnorm_kernel", True]]
