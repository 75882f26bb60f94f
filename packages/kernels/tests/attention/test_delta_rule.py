"""The prompts that FlashInfer's delta rule is given, against a library of its signature that computes what it says."""

from typing import Any

import pytest
import torch

from packages.kernels.tests.ops.test_recurrent import STATES, segments_of
from tercet.kernels.attention import delta_rule
from tercet.kernels.attention.delta_rule import FlashInferDeltaRule, delta_rule_of, prompts_of
from tercet.kernels.ops.recurrent import DeltaInputs, Segment, Segments, gated_delta_rule

CPU = torch.device("cpu")
LENGTHS = {3: 1, 0: 1, 5: 300, 1: 7, 4: 200, 2: 128}
CUTS = {5: (150, 6), 4: (64, 7)}
"""Tokens of each state in a step, and snapshots: two prompts have one in their middle."""


class FakeLibrary:
    """Computes in float32; `error` is added to its results."""

    def __init__(self, error: float = 0.0) -> None:
        self.calls: list[list[int]] = []
        """Lengths of the sequences of each call."""
        self.error = error

    def chunk_gated_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        output_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert output_final_state
        assert all(each.is_contiguous() for each in (q, k, v, g, beta, initial_state, output_state))
        assert q.dtype == k.dtype == v.dtype
        assert g.dtype == beta.dtype == initial_state.dtype == torch.float32
        sequences, heads, rows, columns = initial_state.shape
        assert (heads, rows, columns) == (v.shape[1], v.shape[2], q.shape[2])
        assert g.shape == beta.shape == v.shape[:2]
        starts = cu_seqlens.tolist()
        assert (starts[0], starts[-1], len(starts)) == (0, len(q), sequences + 1)
        self.calls.append(cu_seqlens.diff().tolist())
        inner = initial_state.mT.contiguous()
        rest = [Segment(starts[at], starts[at + 1], at) for at in range(sequences)]
        segments = Segments(torch.empty(0, dtype=torch.int64), rest)
        out = gated_delta_rule(DeltaInputs(q, k, v, g.log(), beta), inner, segments)
        output_state.copy_(inner.mT)
        return out.to(q.dtype) + self.error, output_state


class RefusingLibrary(FakeLibrary):
    """Computes nothing."""

    def chunk_gated_delta_rule(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError("no kernel for this GPU\nand more")


def given(dtype: torch.dtype = torch.bfloat16, dim: int = 128, *factors: int) -> DeltaInputs:
    """Return inputs of which heads lie beside others, as in projections."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS.values())
    mixed = torch.randn(tokens, 8 * dim).to(dtype)
    q, k, v = (each.view(tokens, -1, dim) for each in torch.split(mixed, [2 * dim, 2 * dim, 4 * dim], 1))
    return DeltaInputs(q, k, v, -torch.rand(tokens, 4, *factors) / 5, torch.rand(tokens, 4).to(dtype))


def run(library: FakeLibrary, inputs: DeltaInputs) -> tuple[torch.Tensor, ...]:
    """Return (outputs, states, those of the definition)."""
    dim, segments = inputs.v.shape[2], segments_of(LENGTHS, CUTS)
    states = torch.randn(STATES, 4, dim, dim)
    expected_states = states.clone()
    expected = gated_delta_rule(inputs, expected_states, segments)
    rule = FlashInferDeltaRule(lambda: library, gated_delta_rule)
    return rule(inputs, states, segments), states, expected, expected_states


def test_prompts_are_computed_by_the_library_and_the_rest_is_not() -> None:
    library = FakeLibrary()
    out, states, expected, expected_states = run(library, given())
    torch.testing.assert_close(out, expected, atol=0.03, rtol=0.03)
    torch.testing.assert_close(states, expected_states, atol=0.03, rtol=0.03)
    short = [0, 1, *range(302, 309)]
    assert torch.equal(out[short], expected[short])
    trial, step = library.calls[:2], library.calls[2:]
    assert trial == [[9, 128], [247]]
    assert step == [[128, 64, 150], [136, 150]], "by state, and where a snapshot is taken"


def test_each_size_of_heads_is_tried_once() -> None:
    library, segments = FakeLibrary(), segments_of(LENGTHS, CUTS)
    rule = FlashInferDeltaRule(lambda: library, gated_delta_rule)
    for _ in range(3):
        rule(given(), torch.randn(STATES, 4, 128, 128), segments)
    assert len(library.calls) == 2 + 3 * 2


@pytest.mark.parametrize(
    ("library", "log"),
    [
        (FakeLibrary(0.5), "delta rule is wrong: outputs="),
        (FakeLibrary(float("nan")), "delta rule is wrong: outputs=nan"),
        (RefusingLibrary(), "delta rule refused: heads=4: no kernel for this GPU"),
    ],
)
def test_a_wrong_library_is_not_used(library: FakeLibrary, log: str, caplog: pytest.LogCaptureFixture) -> None:
    out, states, expected, expected_states = run(library, given())
    assert torch.equal(out, expected)
    assert torch.equal(states, expected_states)
    assert log in caplog.text
    assert "and more" not in caplog.text


@pytest.mark.parametrize(
    "inputs",
    [given(torch.float32), given(torch.bfloat16, 64), given(torch.bfloat16, 128, 128)],
    ids=["32", "64", "KDA"],
)
def test_what_it_has_no_kernel_for_is_left_to_the_other(inputs: DeltaInputs) -> None:
    library = FakeLibrary()
    out, states, expected, expected_states = run(library, inputs)
    assert torch.equal(out, expected)
    assert torch.equal(states, expected_states)
    assert library.calls == []


def test_a_library_that_cannot_be_imported_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> FakeLibrary:
        raise ImportError("libcudart is missing")

    states, segments = torch.randn(STATES, 4, 128, 128), segments_of(LENGTHS, CUTS)
    expected = gated_delta_rule(given(), states.clone(), segments)
    assert torch.equal(FlashInferDeltaRule(load, gated_delta_rule)(given(), states, segments), expected)
    assert "delta rule refused: heads=4: libcudart is missing" in caplog.text


def test_decodes_alone_have_no_prompts() -> None:
    segments = segments_of({1: 1, 2: 1, 0: 100})
    assert prompts_of(segments, CPU).rounds == []


@pytest.mark.parametrize(
    ("capability", "missing", "used"), [((9, 0), "", True), ((8, 0), "", False), ((9, 0), "x", False)]
)
def test_it_is_chosen_where_it_is_installed_and_has_the_kernel(
    capability: tuple[int, int], missing: str, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(delta_rule, "missing_flashinfer", lambda: missing)
    monkeypatch.setattr(delta_rule, "missing_compiler", lambda: "")
    monkeypatch.setattr(delta_rule, "import_module", lambda _: FakeLibrary())
    chosen = delta_rule_of(torch.device("cuda"), gated_delta_rule)
    assert isinstance(chosen, FlashInferDeltaRule) == used
    assert used or chosen is gated_delta_rule
