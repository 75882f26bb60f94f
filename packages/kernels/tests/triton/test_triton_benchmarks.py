from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.tools import triton_benchmarks as figures


def test_every_operation_is_measured_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Callable[[], object], _: torch.device) -> float:
        run()
        return 0.5

    monkeypatch.setattr(figures, "_seconds", once)
    monkeypatch.setattr(figures, "HEADS", 2)
    monkeypatch.setattr(figures, "KV_HEADS", 1)
    found = list(figures.fused_figures(device, torch.float32, tokens=16, hidden=64, vocab=64, rows=2, context=8))
    assert len({figure.name for figure in found}) == len(found) == 31
    assert all(figure.amount > 0 for figure in found)
    by_name = {figure.name: figure for figure in found}
    assert by_name["fused add_rmsnorm"].amount == 4 * 16 * 64 * 4
    assert by_name["fused latent decode"].amount == 2 * 8 * 576 * 4
    assert by_name["fused latent extend"].amount == 2 * 16 * (576 + 512) * 36
    assert by_name["fused delta rule, decode"].amount == 2 * 8 * 2 * 128 * 128 * 4
    assert by_name["fused scan, prompt"].amount == 5 * 8 * 2 * 128 * 128
    assert by_name["fused moe, 1 token"].amount == 8 * 3 * 12 * 32 * 4
    assert by_name["fused lora, an adapter each"].amount == 4 * (2 * 64 * (3 * 64 + 96) + 2 * 64 + 2 * 2 * 96)
    assert by_name["fused lora, one adapter"].amount == 4 * (64 * (3 * 64 + 96) + 16 * 64 + 2 * 16 * 96)
    assert by_name["fused int4 linear, 16 rows"].amount < by_name["fused int8 linear, 16 rows"].amount
