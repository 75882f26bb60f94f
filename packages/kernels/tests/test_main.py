"""The command, run in this process."""

import pytest
import torch

from tercet.kernels import check
from tercet.kernels.__main__ import main
from tercet.kernels.attention.select import backend_names
from tercet.kernels.bench import Figure
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.triton import missing_triton


def test_check_passes_here_and_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("torch ")] == [f"{'torch':14} {torch.__version__}"]
    passed = {line.removesuffix(" ok").strip() for line in lines if line.endswith(" ok")}
    missing = {"cpu": missing_library(), "triton": missing_triton(torch.device("cpu")), "flashinfer": "no GPU"}
    backends = {f"attention {name}" for name in backend_names() if not missing.get(name)}
    assert passed == {*backends, *check.OPS}


@pytest.mark.skipif(bool(missing_library()), reason=missing_library())
def test_check_tells_which_native_kernels_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("native kernels")]
    library = load_library()
    assert line.split()[2] == library.level
    assert line.endswith(f"{library.threads} threads")


def test_what_cannot_run_here_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*_: object) -> None:
        raise UnavailableBackendError("libtercet_portable.so was not built")

    monkeypatch.setattr("tercet.kernels.attention.select.load_library", unavailable)
    monkeypatch.setattr("tercet.kernels.__main__.missing_library", lambda: "it was not built")
    assert main(["check"]) == 0
    output = capsys.readouterr().out
    assert "native kernels none: it was not built\n" in output
    assert f"{'attention cpu':24} not here: libtercet_portable.so was not built\n" in output


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

    monkeypatch.setattr("tercet.kernels.bench.measure", once)
    monkeypatch.setattr("tercet.kernels.bench.VOCAB", 1000)
    monkeypatch.setattr("tercet.kernels.__main__.default_device", lambda: cpu)
    assert main(["bench", "--attention", "torch_native"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(called) + 1
    assert sum("(ceiling)" in line for line in lines) == 2
    assert sum("%" in line for line in lines) == len(lines) - 3


def test_a_figure_is_amount_over_time() -> None:
    assert Figure("x", 0.5, 3e9, "GB/s").achieved == 6.0


def test_nonsense_ends_with_a_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--attention", "magic"])
    assert exit_info.value.code == 2
    assert "usage: tercet-kernels" in capsys.readouterr().err
