import math

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

import triton
import triton.language as tl

from tercet.kernels.ops import sampling as reference
from tercet.kernels.ops.philox import NoiseKey, gumbel_reference, uniform_reference
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.sampling import sampling
from tercet.kernels.triton.sampling.scores import gumbel, gumbel_bound, output_word, unit_interval

OFF = (0, 1.0, 0.0)
SEEDS = [0, 1, 42, 2**32, 2**64 - 1, 81985529216486895]


def keys(count: int, device: torch.device) -> NoiseKey:
    seeds = [SEEDS[row % len(SEEDS)] for row in range(count)]
    words = [[seed & 0xFFFFFFFF for seed in seeds], [seed >> 32 for seed in seeds], [3] * count, [*range(count)]]
    return NoiseKey(*torch.tensor(words, device=device))


def filters(device: torch.device, *rows: tuple[int, float, float]) -> Filters:
    top_k, top_p, min_p = zip(*rows, strict=True)
    return Filters(*(torch.tensor(values, device=device) for values in (top_k, top_p, min_p)))


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(uniform_ptr, exact_ptr, bound_ptr, seed_ptr, choice, position, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.arange(0, block)
    word = output_word(tl.load(seed_ptr), tl.load(seed_ptr + 1), choice, position, token)
    u = unit_interval(word)
    tl.store(uniform_ptr + token, u)
    tl.store(exact_ptr + token, gumbel(u))
    tl.store(bound_ptr + token, gumbel_bound(word))


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_the_reference_to_the_bit(seed: int, device: torch.device) -> None:
    uniform, exact, bound = torch.zeros(3, 512, device=device).unbind()
    words = torch.tensor([seed & 0xFFFFFFFF, seed >> 32], device=device)
    noise_kernel[(1,)](uniform, exact, bound, words, 3, 1000, block=512)
    assert uniform.tolist() == [uniform_reference(seed, 3, 1000, token) for token in range(512)]
    assert exact.tolist() == [gumbel_reference(seed, 3, 1000, token) for token in range(512)]
    above = bound * math.log(2) - exact
    assert above.min() > -1e-5
    assert above[uniform < 0.05].max() < 0.1


def compare(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    given: Filters | None,
    tiling: Tiling = sampling.TILINGS[0],
    capacity: int = sampling.CAPACITY,
) -> torch.Tensor:
    noise = keys(len(logits), logits.device)
    actual = sampling.sample(logits, temperature, given, noise, tiling=tiling, capacity=capacity)
    assert torch.equal(actual, reference.sample(logits, temperature, given, noise))
    return actual


def test_unfiltered(device: torch.device) -> None:
    logits = torch.randn(4, 1000, device=device) * 3
    logits[1, 500:] = float("-inf")
    tokens = compare(logits, torch.tensor([1.0, 0.5, 1.7, 1e-35], device=device), None, Tiling(256, 4))
    assert tokens[3] == logits[3].argmax()


@pytest.mark.parametrize("tiling", sampling.TILINGS, ids=str)
def test_draws_do_not_depend_on_the_tiling(tiling: Tiling, device: torch.device) -> None:
    logits = torch.randn(4, tiling.block + 700, device=device)
    one = torch.ones(4, device=device)
    compare(logits, one, None, tiling)
    compare(logits, one, filters(device, (50, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.8, 0.01), OFF), tiling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 0.3, 10.0])
def test_the_winner_may_lie_in_any_block(spread: float, dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(8, 1001, device=device) * spread).to(dtype)
    tokens = compare(logits, torch.full((8,), 0.9, device=device), None, Tiling(128, 4))
    assert len({token // 128 for token in tokens.tolist()}) > 2


@pytest.mark.parametrize(
    "kept",
    [
        [(5, 1.0, 0.0), (1, 1.0, 0.0), (1000, 1.0, 0.0), (4096, 0.9, 0.0)],
        [(0, 0.9, 0.0), (0, 0.1, 0.0), (0, 0.999, 0.0), (0, 0.0, 0.0)],
        [(40, 0.8, 0.0), (3, 0.99, 0.0), (40, 0.95, 0.2), (0, 1.0, 0.1)],
        [OFF, (0, 1.0, 1.0), (2, 0.5, 0.5), (0, 0.3, 0.01)],
    ],
)
def test_filters(kept: list[tuple[int, float, float]], device: torch.device) -> None:
    logits = torch.randn(4, 1000, device=device) * 3
    compare(logits, torch.tensor([1.0, 2.5, 0.7, 1.3], device=device), filters(device, *kept), Tiling(512, 4))


@pytest.mark.parametrize("capacity", [16, 48, sampling.CAPACITY])
@pytest.mark.parametrize("kept", [(7, 1.0, 0.0), (0, 0.35, 0.0), (11, 0.5, 0.0)])
def test_ties_are_kept_by_id(kept: tuple[int, float, float], capacity: int, device: torch.device) -> None:
    """Five tokens lead, forty are equal behind them: the filters cut through the forty."""
    logits = torch.full((6, 300), -9.0, device=device)
    logits[:, 100:140] = 1.0
    logits[:, [7, 299, 120, 40, 250]] = 2.0
    given = filters(device, *[kept] * 6)
    tokens = compare(logits, torch.full((6,), 3.0, device=device), given, capacity=capacity)
    assert len(set(tokens.tolist())) > 2


def test_masked_tokens_are_no_candidates(device: torch.device) -> None:
    """A grammar allows fewer tokens than are wanted, or more than a list holds."""
    logits = torch.full((4, 9000), float("-inf"), device=device)
    logits[0, [17, 4000, 8999]] = torch.tensor([1.0, 2.0, 3.0], device=device)
    logits[1, 4100:4400] = torch.randn(300, device=device)
    logits[2:] = torch.randn(2, 9000, device=device)
    logits[3, ::2] = float("-inf")
    one = torch.ones(4, device=device)
    for kept in ((5, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.2)):
        compare(logits, one, filters(device, *[kept] * 4), capacity=1024)


def test_rows_without_a_token(device: torch.device) -> None:
    logits = torch.zeros(4, 40, device=device)
    logits[0] = float("-inf")
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    one = torch.ones(4, device=device)
    for given in (None, filters(device, *[(5, 0.9, 0.0)] * 4)):
        assert sampling.sample(logits, one, given, keys(4, device)).tolist()[:3] == [-1, -1, -1]
        assert sampling.sample(logits, one, given, keys(4, device))[3] >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_across_blocks_are_kept_by_id(dtype: torch.dtype, device: torch.device) -> None:
    """Forty equal tokens lie in two blocks; what is kept of them ends in the first or the second."""
    kept = [(7, 1.0, 0.0), (21, 1.0, 0.0), (38, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.6, 0.0), (30, 0.9, 0.5)]
    logits = torch.full((len(kept) * 2, 300), -9.0, device=device, dtype=dtype)
    logits[:, 54:64] = 1.0
    logits[:, 100:130] = 1.0
    logits[:, 299] = 2.0
    tokens = compare(logits, torch.full((len(logits),), 3.0, device=device), filters(device, *kept * 2), Tiling(128, 4))
    assert len(set(tokens.tolist())) > 5


def test_logits_that_rounding_makes_equal_are_kept_by_id(device: torch.device) -> None:
    """Below a large logit small ones score alike, whatever their order."""
    logits = torch.linspace(1e-9, 1e-7, 200, device=device)[None].repeat(6, 1)
    logits[:, 150] = 4.0
    kept = [(2, 1.0, 0.0), (60, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.8, 0.0), (199, 0.9, 0.0), (150, 1.0, 0.0)]
    compare(logits, torch.full((6,), 1.5, device=device), filters(device, *kept))


@pytest.mark.parametrize("capacity", [64, 512, sampling.CAPACITY])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_any_filters_of_any_logits(seed: int, capacity: int, device: torch.device) -> None:
    """Rows with different filters in one call, flat and peaked, of every type, a vocabulary of no round number.

    Lists of candidates have room for few tokens, for more than are wanted, or for all.
    """
    torch.manual_seed(seed)
    rows, vocab = 6, 777 + seed
    spread = 10 ** (torch.rand(rows, 1) * 3 - 1.5)
    logits = torch.randn(rows, vocab) * spread + torch.randn(rows, 1) * 20
    logits = torch.where(torch.rand(rows, vocab) < 0.1, float("-inf"), logits)
    logits = logits.to((torch.float32, torch.bfloat16, torch.float16)[seed % 3]).to(device)
    temperature = 10 ** (torch.rand(rows) * 2 - 1)
    top_k = torch.randint(1, 2 * vocab, (rows,)) // 10 ** torch.randint(0, 4, (rows,)) * (torch.rand(rows) < 0.5)
    top_p = torch.where(torch.rand(rows) < 0.7, torch.rand(rows), 1.0)
    min_p = torch.where(torch.rand(rows) < 0.3, torch.rand(rows) / 5, 0.0)
    given = Filters(top_k.to(device), top_p.to(device), min_p.to(device))
    compare(logits, temperature.to(device), given, Tiling(256, 4), capacity)


@pytest.mark.parametrize("steps", [1, 40])
def test_top_k_of_fewer_tokens_than_blocks_and_of_more(steps: int, device: torch.device) -> None:
    """Logits of a few steps are equal in many blocks."""
    logits = torch.randn(8, 701, device=device).mul(steps).round().div(steps)
    kept = [(count, 1.0, 0.0) for count in (1, 2, 3, 4, 5, 6, 7, 40)]
    tokens = compare(logits, torch.full((8,), 9.0, device=device), filters(device, *kept), Tiling(128, 4))
    assert len({token // 128 for token in tokens.tolist()}) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_winners_outside_top_p_are_redrawn(dtype: torch.dtype, device: torch.device) -> None:
    """Of flat rows hardly any first draw stands, and what is kept lies in all blocks."""
    logits = (torch.randn(8, 701, device=device) / 3).to(dtype)
    one, tiling = torch.ones(8, device=device), Tiling(128, 4)
    kept = [(0, 0.02, 0.0), (0, 0.2, 0.0), (500, 0.2, 0.0), (0, 0.1, 0.3)] * 2
    first, tokens = compare(logits, one, None, tiling), compare(logits, one, filters(device, *kept), tiling)
    assert (first != tokens).sum() > 4
    assert len({token // 128 for token in tokens.tolist()}) > 3
