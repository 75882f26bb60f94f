"""The command, run in this process."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from tercet.kernels import __main__ as cli
from tercet.kernels import device as device_module
from tercet.kernels.__main__ import main
from tercet.kernels.attention import select
from tercet.kernels.attention.select import backend_names
from tercet.kernels.errors import BusyDeviceError
from tercet.kernels.native.library import Library, load_library, missing_library
from tercet.kernels.native.linear import PackedLinear, pack_linear
from tercet.kernels.tools import bench, check, native_benchmarks
from tercet.kernels.tools import native_checks as checks
from tercet.kernels.tools.bench import Figure
from tercet.kernels.tools.native_benchmarks import native_figures
from tercet.kernels.triton import missing_triton


@pytest.mark.parametrize(
    ("command", "streams", "code"),
    [
        ("check", ">/dev/full", 1),
        pytest.param("check", ">/dev/full 2>/dev/full", 1, marks=pytest.mark.slow),
        ("--help", ">&-", 0),
    ],
)
def test_output_that_cannot_be_written_is_an_error_of_one_line(command: str, streams: str, code: int) -> None:
    words = ["bash", "-c", f'exec "$@" {streams}', "bash", sys.executable, "-m", "tercet.kernels", command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    told = "tercet-kernels: No space left on device\n" if streams == ">/dev/full" else ""
    assert (done.returncode, done.stderr) == (code, told)


def test_check_passes_here_and_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("torch ")] == [f"{'torch':14} {torch.__version__}"]
    passed = {line.removesuffix(" ok").strip() for line in lines if line.endswith(" ok")}
    missing = {"cpu": missing_library(), "triton": missing_triton(torch.device("cpu")), "flashinfer": "no GPU"}
    missing["cudnn"] = "no GPU"
    backends = {f"attention {name}" for name in backend_names() if not missing.get(name)}
    backends |= {f"latent {name}" for name in backend_names(latent=True) if not missing.get(name)}
    native = set() if missing_library() else set(checks.CHECKS)
    assert passed == {*backends, *check.OPS, *native}


def test_describe_checks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe"]) == 0
    names = [line[:14].strip() for line in capsys.readouterr().out.splitlines()]
    assert names[:3] == ["torch", "processor", "cpu features"]
    assert names[-1] == "native kernels"


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_check_names_the_native_kernels_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("native kernels")]
    library = load_library()
    assert line.split()[2] == library.level
    assert line.endswith(f"{library.threads} threads")


def test_unavailable_backends_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(select, "missing_library", lambda: "libtercet_portable.so was not built")
    monkeypatch.setattr(cli, "missing_library", lambda: "it was not built")
    assert main(["check"]) == 0
    output = capsys.readouterr().out
    assert "native kernels none: it was not built\n" in output
    assert f"{'attention cpu':24} not here: attention backend 'cpu': libtercet_portable.so was not built\n" in output


def test_check_fails_on_a_wrong_operation_and_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "rmsnorm", lambda x, *_: x)
    monkeypatch.setattr(check, "store_kv", lambda *_: 1 / 0)
    assert main(["check"]) == 1
    report = {line[:24].strip(): line[25:] for line in capsys.readouterr().out.splitlines()}
    assert report["rmsnorm"].startswith("AssertionError: Tensor-likes are not close")
    assert report["store_kv"].startswith("ZeroDivisionError")
    assert report["rope"] == "ok"


def test_nothing_is_checked_after_the_device_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(check.OPS, "rope", fails)
    assert main(["check"]) == 1
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["rmsnorm"] == "ok"
    assert said["rope"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert said["activation"] == said["bitmask"] == "not run: the device has failed"


def test_bench_measures_every_figure_against_its_ceiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, called = torch.device("cpu"), []

    def once(run: object, device: torch.device) -> float:
        assert device == cpu
        assert callable(run)
        run()
        called.append(run)
        return 0.5

    monkeypatch.setattr(bench, "measure", once)
    monkeypatch.setattr(native_benchmarks, "measure", once)
    monkeypatch.setattr(bench, "VOCAB", 1000)
    small = partial(native_figures, width=64, rotated=1, hidden=128, batches=(1, 8))
    monkeypatch.setattr(cli, "native_figures", small)
    monkeypatch.setattr(cli, "default_device", lambda: cpu)
    assert main(["bench", "--attention", "torch_native"]) == 0
    lines = capsys.readouterr().out.splitlines()
    twice = 0 if missing_library() else 12  # by what is read and by arithmetic: 3 formats, 2 batches, layer and decoder
    assert len(lines) == len(called) + twice + 1
    assert sum("(ceiling)" in line for line in lines) == 2
    assert sum("%" in line for line in lines) == len(lines) - 3


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_check_sees_a_wrong_native_linear_and_decoder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_wrong(library: Library, weight: torch.Tensor, *bias: torch.Tensor, **options: Any) -> PackedLinear:
        weight = weight.clone()
        weight[-1, -1] += 0.5
        return pack_linear(library, weight, *bias, **options)

    monkeypatch.setattr(checks, "pack_linear", one_wrong)
    assert main(["check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = {line[:24].strip() for line in lines if "Tensor-likes are not close" in line}
    assert wrong == set(checks.CHECKS)


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_native_figures_count_what_is_read_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_benchmarks, "measure", lambda *_: 1.0)
    found = {
        (each.name, each.unit): each.amount for each in native_figures(width=64, rotated=1, hidden=128, batches=(8,))
    }
    assert found["bfloat16 linear, 8 rows", "GB/s"] == 2 * 64 * 64
    assert found["int8 linear, 8 rows", "GB/s"] == 64 * 64
    assert found["int4 linear, 8 rows", "GB/s"] == 64 * 64 / 2 + 2 * 64 * 64 / 32  # and a scale for every 32
    assert found["int8 linear, 8 rows", "GFLOP/s"] == 2 * 8 * 64 * 64
    layer = (3 * 128 + 128 + 3 * 448) * 128  # one head of each kind
    assert found["int8 decoder, 8 rows", "GB/s"] == 2 * (layer + 8 * 256 * 2 * 128 * 2)
    assert found["int8 decoder, 8 rows", "GFLOP/s"] == 2 * 2 * 8 * (layer + 2 * 256 * 128)


def test_a_figure_is_amount_over_time() -> None:
    assert Figure("x", 0.5, 3e9, "GB/s").achieved == 6.0


def test_a_gpu_that_others_hold_is_told_of_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(_: int = 0) -> str:
        raise BusyDeviceError("GPU 0 cannot be used now: CUDA error: out of memory")

    monkeypatch.setattr(device_module, "missing_gpu", busy)
    for command in ("check", "bench"):
        assert main([command]) == 1
        assert capsys.readouterr().out == "GPU 0 cannot be used now: CUDA error: out of memory\n"


def test_nonsense_ends_with_a_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--attention", "magic"])
    assert exit_info.value.code == 2
    assert "usage: tercet-kernels" in capsys.readouterr().err
