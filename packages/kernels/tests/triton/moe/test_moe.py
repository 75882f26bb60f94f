import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import moe as reference
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.moe import Routing
from tercet.kernels.ops.quantized import Format, QuantizedWeight, quantize
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.linear.dequantize import dequantize
from tercet.kernels.triton.moe import moe
from tercet.kernels.triton.moe import moe_gemv as full_expert_rows
from tercet.kernels.triton.moe import moe_gemv_quantized as expert_rows
from tercet.kernels.triton.moe import moe_gemv_scaled as scaled_rows
from tercet.kernels.triton.moe.moe import fused_moe
from tercet.kernels.triton.moe.moe_align import moe_align
from tercet.kernels.triton.moe.route import route


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(tokens, 40, device=device).to(dtype)
    gate_up, down = torch.randn(6, 48, 40, device=device) / 6, torch.randn(6, 40, 24, device=device) / 5
    weights, experts = reference.route(torch.randn(tokens, 6, device=device), Routing(top_k=2, renormalize=True))
    given = (x, weights, experts, gate_up.to(dtype), down.to(dtype))
    tolerance = 8 * torch.finfo(dtype).eps if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize(
    ("kind", "block"), [("fp8", (1, 32)), ("fp8", (24, 64)), ("int8", (1, 96)), ("int4", (1, 32)), ("int4", (1, 96))]
)
def test_quantised_experts(tokens: int, kind: Format, block: tuple[int, int], device: torch.device) -> None:
    x = torch.randn(tokens, 96, device=device)
    gate_up, down = (
        reference.QuantizedExperts(quantize(torch.randn(4 * n, 96, device=device) / 8, kind, block), 4)
        for n in (192, 96)
    )
    weights, experts = reference.route(torch.randn(tokens, 4, device=device), Routing(top_k=2, renormalize=True))
    given = (x, weights, experts, gate_up, down)
    torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "block"), [("fp8", (24, 32)), ("int4", (1, 32)), ("mxfp4", (1, 32))])
@pytest.mark.parametrize("held", [1 << 30, 3 * 192 * 96 * 4, 1])
def test_experts_of_many_tokens_are_dequantized_first(
    kind: Format, block: tuple[int, int], held: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, three and six at a time, and one at a time. An expert without tokens is among them."""
    pieces = list[int]()

    def counted(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        pieces.append(len(weight.codes))
        return dequantize(weight, dtype)

    monkeypatch.setattr(moe, "dequantize", counted)
    monkeypatch.setattr(moe, "_FULL_ROWS", 8)
    monkeypatch.setattr(moe, "_FULL_BYTES", held)
    x = torch.randn(33, 96, device=device)
    gate_up, down = (
        reference.QuantizedExperts(quantize(torch.randn(7 * n, 96, device=device) / 8, kind, block), 7)
        for n in (192, 96)
    )
    biases = reference.ExpertBiases(torch.randn(7, 192, device=device), torch.randn(7, 96, device=device))
    logits = torch.randn(33, 7, device=device)
    logits[:, 4] = -9
    weights, experts = reference.route(logits, Routing(top_k=2, renormalize=True))
    given = (x, weights, experts, gate_up, down)
    actual = fused_moe(*given, biases=biases)
    torch.testing.assert_close(actual, reference.fused_moe(*given, biases=biases), rtol=1e-5, atol=1e-5)
    each = {1 << 30: ([7], [7]), 3 * 192 * 96 * 4: ([3, 3, 1], [6, 1]), 1: ([1] * 7, [1] * 7)}[held]
    assert pieces == [count * 192 for count in each[0]] + [count * 96 for count in each[1]]


def test_experts_of_very_many_tokens_have_tall_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = list[int]()

    def counted(experts: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks.append(block)
        return moe_align(experts, count, block)

    monkeypatch.setattr(moe, "moe_align", counted)
    monkeypatch.setattr(moe, "_TALL_ROWS", 20)
    x = torch.randn(100, 40, device=device).half()
    gate_up, down = torch.randn(6, 48, 40, device=device).half() / 6, torch.randn(6, 40, 24, device=device).half() / 5
    weights, experts = reference.route(torch.randn(100, 6, device=device), Routing(top_k=2, renormalize=True))
    for tokens in (100, 50):
        given = (x[:tokens], weights[:tokens], experts[:tokens], gate_up, down)
        torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=8e-3, atol=8e-3)
    assert blocks == [128, 16]


Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Projections = tuple[reference.QuantizedExperts, reference.QuantizedExperts]


def published(
    tokens: int, device: torch.device, dtype: torch.dtype = torch.float32, *, hidden: int = 96, top_k: int = 3
) -> tuple[Routed, Projections, reference.ExpertBiases]:
    """(inputs, weights and experts of tokens; the projections of 4 experts in mxfp4; their biases)."""
    size, count = 32, 4
    gate_up, down = (
        reference.QuantizedExperts(quantize(torch.randn(count * n, k, device=device) / 4, "mxfp4", (1, 32)), count)
        for n, k in ((2 * size, hidden), (hidden, size))
    )
    biases = reference.ExpertBiases(
        torch.randn(count, 2 * size, device=device).to(dtype), torch.randn(count, hidden, device=device).to(dtype)
    )
    routed = reference.route(torch.randn(tokens, count, device=device), Routing(top_k=top_k, renormalize=True))
    return (torch.randn(tokens, hidden, device=device).to(dtype), *routed), (gate_up, down), biases


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("gate", "biased"), [("silu", False), ("clamped", True)])
def test_published_experts(tokens: int, dtype: torch.dtype, gate: Gate, biased: bool, device: torch.device) -> None:
    """Few tokens and many, of sizes that are no whole tiles."""
    given, projections, biases = published(tokens, device, dtype)
    added = biases if biased else None
    actual, expected = (op(*given, *projections, gate=gate, biases=added) for op in (fused_moe, reference.fused_moe))
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("tiling", expert_rows.TILINGS)
def test_few_tokens_with_every_tiling(tiling: Tiling, device: torch.device) -> None:
    given, projections, biases = published(1, device, hidden=1056, top_k=1)
    actual = expert_rows.few_tokens(*given, *projections, gate="clamped", biases=biases, tiling=tiling)
    expected = reference.fused_moe(*given, *projections, gate="clamped", biases=biases)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


SCALED: list[tuple[Format, tuple[int, int]]] = [
    ("fp8", (1, 1 << 30)),
    ("fp8", (64, 128)),
    ("int8", (1, 1 << 30)),
    ("int4", (1, 32)),
    ("int4", (1, 128)),
]


@pytest.mark.parametrize("form", SCALED)
@pytest.mark.parametrize(("tokens", "top_k", "sizes"), [(2, 4, (256, 384)), (1, 3, (640, 128)), (1, 1, (1280, 128))])
@pytest.mark.parametrize("biased", [False, True])
def test_few_tokens_of_scaled_experts(
    form: tuple[Format, tuple[int, int]],
    tokens: int,
    top_k: int,
    sizes: tuple[int, int],
    biased: bool,
    device: torch.device,
) -> None:
    """Of one expert for a token, three and four, of rows that are no whole pieces."""
    (hidden, size), count = sizes, 5
    gate_up, down = (
        reference.QuantizedExperts(quantize(torch.randn(count * n, k, device=device) / k**0.5, *form), count)
        for n, k in ((2 * size, hidden), (hidden, size))
    )
    biases = reference.ExpertBiases(
        torch.randn(count, 2 * size, device=device), torch.randn(count, hidden, device=device)
    )
    routed = reference.route(torch.randn(tokens, count, device=device), Routing(top_k=top_k, renormalize=True))
    given = (torch.randn(tokens, hidden, device=device), *routed, gate_up, down)
    assert scaled_rows.few(routed[1], gate_up, down)
    added = biases if biased else None
    actual, expected = (op(*given, gate="silu", biases=added) for op in (fused_moe, reference.fused_moe))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiling", scaled_rows.TILINGS)
def test_scaled_experts_with_every_tiling(tiling: Tiling, device: torch.device) -> None:
    gate_up, down = (
        reference.QuantizedExperts(quantize(torch.randn(3 * n, k, device=device) / 16, "fp8", (1, k)), 3)
        for n, k in ((2 * 128, 512), (512, 128))
    )
    routed = reference.route(torch.randn(1, 3, device=device), Routing(top_k=2, renormalize=True))
    given = (torch.randn(1, 512, device=device), *routed, gate_up, down)
    actual = scaled_rows.few_tokens(*given, gate="silu", biases=(None, None), tiling=tiling)
    torch.testing.assert_close(actual, reference.fused_moe(*given), rtol=1e-4, atol=1e-4)


def test_many_pairs_of_scaled_experts_are_sorted() -> None:
    weight = reference.QuantizedExperts(quantize(torch.randn(256, 128), "int8", (1, 128)), 2)
    assert scaled_rows.few(torch.zeros(4, 4), weight, weight)
    assert not scaled_rows.few(torch.zeros(17, 1), weight, weight)
    short = reference.QuantizedExperts(quantize(torch.randn(256, 192), "int8", (1, 192)), 2)
    assert not scaled_rows.few(torch.zeros(1, 1), weight, short)


@pytest.mark.parametrize(("tokens", "top_k", "sizes"), [(2, 4, (1056, 6)), (1, 3, (10, 1100)), (16, 1, (64, 33))])
@pytest.mark.parametrize("biased", [False, True])
def test_few_tokens_of_experts_in_full(
    tokens: int, top_k: int, sizes: tuple[int, int], biased: bool, device: torch.device
) -> None:
    """Of rows that are no whole pieces, and of one expert for a token, three and four."""
    (hidden, size), count = sizes, 8
    gate_up = torch.randn(count, 2 * size, hidden, device=device) / hidden**0.5
    down = torch.randn(count, hidden, size, device=device) / size**0.5
    some = reference.ExpertBiases(*(torch.randn(count, n, device=device) for n in (2 * size, hidden)))
    weights, experts = reference.route(torch.randn(tokens, count, device=device), Routing(top_k=top_k))
    given = (torch.randn(tokens, hidden, device=device), weights, experts, gate_up, down)
    assert full_expert_rows.few(experts)
    biases = some if biased else None
    actual, expected = (op(*given, gate="gelu_tanh", biases=biases) for op in (fused_moe, reference.fused_moe))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [4, 33])
def test_a_token_that_is_no_number_leaves_others_alone(tokens: int, device: torch.device) -> None:
    """Few tokens and many, of three experts each."""
    given, _, _ = published(tokens, device)
    gate_up, down = torch.randn(4, 64, 96, device=device) / 4, torch.randn(4, 96, 32, device=device) / 4
    for strange in (float("nan"), float("inf")):
        given[0][0] = strange
        actual, expected = (op(*given, gate_up, down) for op in (fused_moe, reference.fused_moe))
        torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_without_a_gate(tokens: int, device: torch.device) -> None:
    given, _, _ = published(tokens, device)
    up, down = torch.randn(4, 64, 96, device=device) / 4, torch.randn(4, 96, 64, device=device) / 4
    actual, expected = (op(*given, up, down, gate=None) for op in (fused_moe, reference.fused_moe))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize("tokens", [1, 33])
def test_full_experts_with_biases(tokens: int, device: torch.device) -> None:
    given, _, biases = published(tokens, device)
    gate_up, down = torch.randn(4, 64, 96, device=device) / 4, torch.randn(4, 96, 32, device=device) / 4
    actual, expected = (
        op(*given, gate_up, down, gate="clamped", biases=biases) for op in (fused_moe, reference.fused_moe)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 32, 4), (3, 60, 6), (2, 4, 4), (2, 5, 1)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_a_token_goes_where_the_reference_sends_it(
    tokens: int, count: int, top_k: int, renormalize: bool, device: torch.device
) -> None:
    logits = torch.randn(tokens, count, device=device) * 4
    weights, experts = route(logits, Routing(top_k=top_k, renormalize=renormalize))
    expected = reference.route(logits, Routing(top_k=top_k, renormalize=renormalize))
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)


CHOICES = [
    (12, Routing(top_k=3, score="sigmoid", renormalize=True)),
    (384, Routing(top_k=8, score="sigmoid", renormalize=True, scale=2.5)),
    (256, Routing(top_k=8, score="sigmoid", groups=8, top_groups=4, group_best=2)),
    (20, Routing(top_k=3, renormalize=True, scale=1.5)),
    (60, Routing(top_k=6, scale=16.0, groups=3, top_groups=2)),
]


@pytest.mark.parametrize(("count", "routing"), CHOICES)
@pytest.mark.parametrize("corrected", [False, True])
def test_scores_are_compared_as_the_reference_does(
    count: int, routing: Routing, corrected: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, count, device=device) * 2
    correction = torch.randn(count, device=device) / 4 if corrected else None
    weights, experts = route(logits, routing, correction)
    expected = reference.route(logits, routing, correction)
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)


def test_of_equal_scores_the_first_experts_of_the_first_groups_go_first(device: torch.device) -> None:
    routing = Routing(top_k=3, score="sigmoid", groups=4, top_groups=2, group_best=2)
    assert route(torch.zeros(1, 8, device=device), routing)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_experts_exist_for_any_logits(strange: float, device: torch.device) -> None:
    _, experts = route(torch.full((2, 5), strange, device=device), Routing(top_k=3, renormalize=True))
    assert experts.min() >= 0
    assert experts.max() < 5
    _, experts = route(torch.full((2, 6), strange, device=device), Routing(top_k=3, groups=3, top_groups=2))
    assert experts.min() >= 0
    assert experts.max() < 6


def test_every_pair_lies_in_one_tile_of_its_expert(device: torch.device) -> None:
    experts = torch.tensor([[4, 0], [4, 1], [4, 0], [0, 4]], device=device)
    pairs, expert_of = moe_align(experts, 5, 2)
    assert expert_of.tolist() == [0, 0, 1, 4, 4, 5, 5, 5, 5]
    tiles = pairs.view(-1, 2).tolist()
    assert sorted(tiles[0] + tiles[1]) == [1, 5, 6, 8]
    assert tiles[1][1] == 8
    assert tiles[2] == [3, 8]
    assert sorted(tiles[3] + tiles[4]) == [0, 2, 4, 7]
    assert tiles[5:] == [[8, 8]] * 4


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "block"), [(1, 8, 2, 16), (700, 60, 6, 64), (33, 384, 8, 16), (2100, 4, 4, 32)]
)
def test_experts_of_many_pairs_follow_each_other(
    tokens: int, count: int, top_k: int, block: int, device: torch.device
) -> None:
    """Of several programs that count and that give places, where some experts have none, and one has many."""
    drawn = torch.rand(tokens, count, device=device) * torch.linspace(0.3, 1, count, device=device)
    experts = drawn.topk(top_k).indices
    pairs, expert_of = moe_align(experts, count, block)
    tiles, nobody = pairs.view(len(expert_of), block), experts.numel()
    there = tiles < nobody
    assert torch.equal(tiles[there].sort().values, torch.arange(nobody, device=device))
    assert (tiles[~there] == nobody).all()
    owners = expert_of[:, None].expand_as(tiles)
    assert torch.equal(owners[there], experts.flatten()[tiles[there]])
    assert torch.equal(expert_of, expert_of.sort().values)
    sizes = experts.flatten().bincount(minlength=count)
    used = torch.arange(count, device=device).repeat_interleave((sizes + block - 1) // block)
    assert torch.equal(expert_of, torch.nn.functional.pad(used, (0, len(expert_of) - len(used)), value=count))
    assert (there[:, 1:] <= there[:, :-1]).all(), "empty rows are behind the others"
