import math

import pytest
import torch

from tercet.kernels.ops.philox import (
    GUMBEL_MAX,
    NoiseKey,
    gumbel,
    gumbel_reference,
    philox4x32,
    philox4x32_reference,
    uniform,
    uniform_reference,
    unit_interval,
)

Quad = tuple[int, int, int, int]

KNOWN_ANSWERS: list[tuple[Quad, tuple[int, int], Quad]] = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""philox4x32-10 in the file kat_vectors of Random123, by the authors of the paper."""

GOLDEN: dict[tuple[int, int, int, int], tuple[float, float]] = {
    (0, 0, 0, 0): (0.39904648065567017, 0.6748403906822205),
    (0, 0, 0, 1): (0.5166791677474976, 0.31872621178627014),
    (0, 0, 1, 0): (0.4172481298446655, 0.6161976456642151),
    (0, 1, 0, 0): (0.972241222858429, -1.276536226272583),
    (1, 0, 0, 0): (0.8902591466903687, -0.7928267121315002),
    (4294967296, 0, 0, 0): (0.9916723966598511, -1.5661503076553345),
    (42, 0, 17, 128255): (0.9549939036369324, -1.1317108869552612),
    (18446744073709551615, 127, 131071, 151935): (0.9066379070281982, -0.863425612449646),
    (81985529216486895, 3, 1000, 31999): (0.5732141137123108, 0.1607876867055893),
}
"""(seed, choice, position, token) to (uniform, Gumbel noise). These may never change: resumed requests rely on them."""


def key_of(*rows: tuple[int, int, int]) -> NoiseKey:
    """Of (seed, choice, position) triples."""
    seeds, choices, positions = zip(*rows, strict=True)
    low = torch.tensor([seed & 0xFFFFFFFF for seed in seeds])
    return NoiseKey(low, torch.tensor([seed >> 32 for seed in seeds]), torch.tensor(choices), torch.tensor(positions))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: Quad, key: tuple[int, int], expected: Quad) -> None:
    assert philox4x32_reference(counter, key) == expected
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    words = philox4x32((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in words) == expected


def test_golden_noise() -> None:
    key = key_of(*[(seed, choice, position) for seed, choice, position, _ in GOLDEN])
    tokens = torch.tensor([token for *_, token in GOLDEN])
    assert uniform(key, tokens).tolist() == [value for value, _ in GOLDEN.values()]
    assert gumbel(key, torch.arange(len(GOLDEN)), tokens).tolist() == [noise for _, noise in GOLDEN.values()]
    assert [uniform_reference(*row) for row in GOLDEN] == [value for value, _ in GOLDEN.values()]
    assert [gumbel_reference(*row) for row in GOLDEN] == [noise for _, noise in GOLDEN.values()]


def test_vectors_equal_the_reference_across_blocks() -> None:
    rows = [(3, 0, 5), (2**63 + 9, 4, 70000)]
    row_of, tokens = torch.arange(40) % 2, torch.arange(40) * 977
    expected = [gumbel_reference(*rows[i % 2], i * 977) for i in range(40)]
    assert gumbel(key_of(*rows), row_of, tokens, size=7).tolist() == expected


def test_uniforms_stay_inside_the_open_interval() -> None:
    ends = unit_interval(torch.tensor([0, 0xFFFFFFFF]))
    assert ends.tolist() == [2.0**-33, 1 - 2.0**-24]
    noise = torch.log(-torch.log1p(-ends.double())).neg().tolist()
    assert noise == pytest.approx([GUMBEL_MAX, -math.log(24 * math.log(2))])


def test_noise_is_uniform_and_its_coordinates_do_not_correlate() -> None:
    count = 50_000
    tokens = torch.arange(count)
    same = torch.zeros(count, dtype=torch.int64)
    columns = [
        uniform(key_of((11, 0, 0)), tokens),
        uniform(key_of((11, 0, 1)), tokens),
        uniform(key_of((11, 1, 0)), tokens),
        uniform(key_of((12, 0, 0)), tokens),
        uniform(NoiseKey(same + 11, same, same, tokens), same),
    ]
    for column in columns:
        observed = torch.histc(column, bins=64, min=0, max=1)
        chi_square = float(((observed - count / 64) ** 2 / (count / 64)).sum())
        assert 30 < chi_square < 110  # 63 degrees of freedom: outside with a chance of about 1e-4
    correlation = torch.corrcoef(torch.stack([*columns, columns[0].roll(1)])) - torch.eye(6)
    assert float(correlation.abs().max()) < 5 / math.sqrt(count)


def test_gumbel_noise_has_the_moments_of_its_distribution() -> None:
    noise = gumbel(key_of((5, 0, 0)), torch.zeros(100_000, dtype=torch.int64), torch.arange(100_000)).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)
