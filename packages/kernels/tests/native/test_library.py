import ctypes
import logging
import platform
import shutil
import threading
from pathlib import Path

import pytest
import torch

from tercet.kernels.attention.cpu import rows_of
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native import abi
from tercet.kernels.native.library import FOLDER, LEVELS, Library, available_cores, load_library, usable_levels
from tercet.kernels.native.linear import pack_linear
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.tools.check import make_batch

needs_library = pytest.mark.skipif(not (FOLDER / "libtercet_portable.so").is_file(), reason="there was no compiler")


def test_a_library_that_was_not_built_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        UnavailableBackendError, match=r"libtercet_portable\.so was not built: there was no C\+\+ compiler"
    ):
        Library("avx2", tmp_path)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_a_containers_quota_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("wanted", "cores"), [("3", 3), ("5,2", 5), (" 2 ", 2), ("99", 64), ("", 64), ("0", 64), ("-1", 64), ("many", 64)]
)
def test_the_environment_bounds_the_threads_as_those_of_other_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert available_cores(tmp_path) == cores


@needs_library
def test_one_level_may_be_missing(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "libtercet_portable.so", tmp_path)
    if usable_levels() == ["portable"]:
        pytest.skip("this processor has no other level")
    with pytest.raises(UnavailableBackendError, match=r"libtercet_avx2\.so was not built"):
        Library("avx2", tmp_path)


def test_a_broken_library_says_so(tmp_path: Path) -> None:
    (tmp_path / "libtercet_portable.so").write_bytes(b"not a library")
    with pytest.raises(UnavailableBackendError, match="does not load"):
        Library("portable", tmp_path)


@needs_library
def test_a_library_of_other_sources_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "_SHARED", ())
    with pytest.raises(UnavailableBackendError, match="does not load: it was compiled from other sources"):
        Library("portable")


@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(), reason="nothing to compare")
def test_the_levels_are_those_of_the_flags_that_linux_names() -> None:
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())
    avx512 = {f"avx512{part}" for part in ("f", "dq", "bw", "vl", "_vnni")}
    needed: dict[str, set[str]] = {"portable": set(), "avx2": {"avx2", "fma", "f16c"}}
    needed |= {"avx_vnni": needed["avx2"] | {"avx_vnni"}, "avx512": needed["avx2"] | avx512}
    needed["avx512_bf16"] = needed["avx512"] | {"avx512_bf16"}
    needed["amx"] = needed["avx512_bf16"] | {"amx_tile", "amx_bf16", "amx_int8"}
    assert tuple(needed) == LEVELS
    assert usable_levels() == [level for level, features in needed.items() if features <= flags]


@needs_library
def test_the_best_level_is_loaded_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    load_library.cache_clear()
    with caplog.at_level(logging.INFO):
        assert load_library() is load_library()
    assert [record.message for record in caplog.records] == [f"native kernels for {load_library().level}"]
    assert load_library().level == usable_levels()[-1]


@needs_library
def test_results_do_not_depend_on_threads(library: Library) -> None:
    x, weight = torch.randn(3000, 96), torch.randn(96)
    before = library.threads
    try:
        results = []
        for threads in (1, 2, 5):
            library.set_threads(threads)
            assert library.threads == threads
            results.append(NativeOps(library).rmsnorm(x, weight, 1e-5))
    finally:
        library.set_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_library
def test_callers_in_many_threads_get_their_own_results(library: Library) -> None:
    ops, weight = NativeOps(library), torch.ones(64)
    inputs = [torch.randn(2000, 64) for _ in range(6)]
    outputs: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        outputs[index] = [ops.rmsnorm(inputs[index], weight, 1e-5) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(inputs):
        expected = ops.rmsnorm(x, weight, 1e-5)
        assert all(torch.equal(out, expected) for out in outputs[index])


@needs_library
def test_out_of_memory_is_a_python_error_on_any_thread(library: Library) -> None:
    before = library.threads
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    packed, out = pack_linear(library, weight), torch.empty(4, 32)
    try:
        library.set_threads(3)
        for _ in range(20):
            with pytest.raises(MemoryError, match="native kernels found no memory"):
                library.functions.linear(ctypes.byref(packed.struct), x.data_ptr(), 1 << 50, out.data_ptr())
            with pytest.raises(MemoryError, match="native kernels found no memory"):
                attend_to_heads_of(library, 1 << 44)
            torch.testing.assert_close(packed(x), x @ weight.T, rtol=1e-4, atol=1e-4)
            attend_to_heads_of(library, 8)
    finally:
        library.set_threads(before)


def attend_to_heads_of(library: Library, head_dim: int) -> None:
    """64 rows of one token each: tasks for every thread, each of which takes memory of its own before any other."""
    batch = make_batch([(1, 1)] * 64, 1, torch.device("cpu"))
    values, out = torch.zeros(64, 8), torch.empty(64, 8)
    cache = abi.Cache(values.data_ptr(), values.data_ptr(), abi.FLOAT32, 64, 1, 1, head_dim, head_dim)
    structs = ctypes.byref(cache), ctypes.byref(rows_of(batch)), ctypes.byref(abi.Scoring(1.0, 0.0, 0, None))
    library.functions.attend(values.data_ptr(), *structs, 1, out.data_ptr())
    assert not out.any()


def test_every_function_that_is_exported_is_guarded() -> None:
    source = (Path(__file__).parents[2] / "csrc" / "api.cpp").read_text(encoding="utf-8")
    exported = [text.partition("\n}\n")[0] for text in source.split("\nEXPORT ")[1:]]
    named = {text.partition("(")[0].rpartition("tercet_")[2]: text for text in exported}
    assert named.keys() == abi.SIGNATURES.keys()
    for name, text in named.items():
        can_fail = abi.SIGNATURES[name][0] is None
        assert ("return guarded([&] {" in text, ") noexcept {" in text) == (can_fail, not can_fail)


def test_without_any_library_the_error_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnavailableBackendError, match="was not built"):
        load_library(folder=tmp_path)


@needs_library
def test_an_unknown_level_is_refused_and_a_lower_one_taken(tmp_path: Path) -> None:
    with pytest.raises(UnavailableBackendError, match="not neon"):
        load_library("neon")
    shutil.copy(FOLDER / "libtercet_portable.so", tmp_path)
    assert load_library(folder=tmp_path).level == "portable"
