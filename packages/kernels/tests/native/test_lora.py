"""Steps in which tokens have adapters, against decoders whose weights are merged with one, and against plain torch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from packages.kernels.tests.native.adapted import (
    ALL,
    HIDDEN,
    INNER,
    NONE,
    RANK,
    RANKS,
    Model,
    Rows,
    by_row,
    error,
    lora_rows,
    random_adapters,
    random_ids,
    random_weights,
    run_plain,
    table_of,
)
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import Quantization
from tercet.kernels.native_decoder import LayerAdapters
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.lora import LoRARows, Segment


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


# Prompts, then one token of most of them beside a prompt and one that goes on.
STEPS: list[Rows] = [
    [(5, 5), (37, 37), (1, 1), (18, 18), (2, 2), (17, 17)],
    [(1, 6), (1, 38), (1, 2), (1, 19), (20, 22), (1, 18)],
]
PLACES = [1, 4, NONE, 0, 2, NONE]


def run_merged(model: Model, library: Library, adapters: list[LayerAdapters]) -> None:
    """Each token is what merged weights give, or to the bit what it was where it has no adapter."""
    native = model.native(library, adapters)
    exact = {NONE: model.native(library)}
    exact |= {place: model.merged(adapters, place).native(library) for place in PLACES if place != NONE}
    for rows in STEPS:
        ids = random_ids(rows)
        actual = by_row(native(ids, rows, lora_rows(rows, PLACES)), rows)
        expected = {place: by_row(decoder(ids, rows), rows) for place, decoder in exact.items()}
        for row, place in enumerate(PLACES):
            if place == NONE:
                assert torch.equal(actual[row], expected[NONE][row])
            else:
                assert error(actual[row], expected[place][row]) < 1e-4
                assert error(expected[NONE][row], expected[place][row]) > 0.05


@pytest.mark.parametrize("names", [*([name] for name in ALL), ["gate_up", "down"], ALL], ids="+".join)
def test_adapters_equal_merged_weights(library: Library, names: Sequence[str]) -> None:
    run_merged(Model.random(), library, random_adapters(names))


@pytest.mark.parametrize("gate", ["gelu_tanh", "clamped"])
def test_norms_and_gates_follow_the_adapters_sum(library: Library, gate: Gate) -> None:
    run_merged(Model.random(norms_after=True, gate=gate), library, random_adapters())


def test_layers_of_mixtures(library: Library) -> None:
    run_merged(Model.random(experts=3), library, random_adapters(["qkv", "o"]))


def test_layers_without_adapters(library: Library) -> None:
    nothing = LayerAdapters(None, None, None, None)
    run_merged(Model.random(), library, [nothing, *random_adapters(layers=1)])


FORMATS = [
    (torch.float32, "none", 1e-5),
    (torch.bfloat16, "none", 0.02),
    (torch.float32, "int8", 0.02),
    (torch.bfloat16, "int4", 0.02),
]
"""The last: how far what is computed may be, since a number may be rounded the other way."""


@pytest.mark.parametrize(("dtype", "quantization", "far"), FORMATS)
@pytest.mark.parametrize("names", [*([name] for name in ALL), ALL], ids="+".join)
def test_weights_of_every_format(
    library: Library, names: Sequence[str], dtype: torch.dtype, quantization: Quantization, far: float
) -> None:
    model, adapters = Model.random(dtype=dtype, quantization=quantization, layers=1), random_adapters(names, 1)
    rows, places = STEPS[0], PLACES
    ids, lora = random_ids(rows), lora_rows(rows, places)
    actual = model.native(library, adapters)(ids, rows, lora)
    plain = model.native(library, adapters)(ids, rows)
    exact = run_plain(model, adapters, ids, rows, lora)
    assert error(actual, exact) < far
    assert error(plain, exact) > 0.1
    for row, place in enumerate(places):
        if place == NONE:
            assert torch.equal(by_row(actual, rows)[row], by_row(plain, rows)[row])


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 16, 33, RANK])
def test_every_number_of_tokens(library: Library, rank: int) -> None:
    ranks = [rank, RANK]
    model, adapters = Model.random(layers=1), random_adapters(layers=1, ranks=ranks)
    native, merged = model.native(library, adapters), model.merged(adapters, 0).native(library)
    for tokens in range(1, 41):
        rows, one, all_of_one = [(1, 1)] * tokens, [(tokens, tokens)], [0] * tokens
        ids = random_ids(rows)
        assert error(native(ids, rows, lora_rows(rows, all_of_one, ranks)), merged(ids, rows)) < 1e-4
        assert error(native(ids, one, lora_rows(one, [0], ranks)), merged(ids, one)) < 1e-4


def test_neither_other_tokens_nor_threads_nor_chunks_change_a_token(library: Library) -> None:
    model, adapters, before = Model.random(), random_adapters(), library.threads
    rows, ids = STEPS[0], random_ids(STEPS[0])
    results = []
    try:
        for threads in (1, 2, 5):
            library.set_threads(threads)
            results.append(model.native(library, adapters)(ids, rows, lora_rows(rows, PLACES)))
    finally:
        library.set_threads(before)
    assert all(torch.equal(each, results[0]) for each in results)
    for (new, _), own, place, exact in zip(rows, by_row(ids, rows), PLACES, by_row(results[0], rows), strict=True):
        native, chunks = model.native(library, adapters), [min(7, new - first) for first in range(0, new, 7)]
        ends = list(accumulate(chunks))
        parts = [
            native(own[end - count : end], [(count, end)], lora_rows([(count, end)], [place]))
            for count, end in zip(chunks, ends, strict=True)
        ]
        assert torch.equal(torch.cat(parts), exact)


def test_segments_can_start_and_end_anywhere(library: Library) -> None:
    model, adapters, rows = Model.random(layers=1), random_adapters(layers=1), [(40, 40)]
    ids = random_ids(rows)
    whole = model.native(library, adapters)(ids, rows, lora_rows(rows, [1]))
    cut = table_of([Segment(1, 0, 3), Segment(0, 3, 3), Segment(1, 3, 30), Segment(1, 30, 40), Segment(2, 40, 40)])
    for lora in (cut, replace(cut, runs=None)):
        assert torch.equal(model.native(library, adapters)(ids, rows, lora), whole)


def test_adapter_slots_can_change_between_steps(library: Library) -> None:
    model, adapters, rows = Model.random(layers=1), random_adapters(layers=1), [(6, 6)]
    native, ids, lora = model.native(library, adapters), random_ids([(6, 6)]), lora_rows([(6, 6)], [1])
    first = native(ids, rows, lora)
    for weights in adapters[0]:
        assert weights is not None
        weights.a[1], weights.b[1] = weights.a[1] / 2, weights.b[1] * 3
    assert not torch.equal(native(ids, rows, lora), first)
    assert error(native(ids, rows, lora), model.merged(adapters, 1).native(library)(ids, rows)) < 1e-4


def test_nan_stays_in_its_tokens(library: Library) -> None:
    model, adapters, rows = Model.random(), random_adapters(), STEPS[0]
    ids, lora = random_ids(rows), lora_rows(rows, PLACES)
    right = by_row(model.native(library, adapters)(ids, rows, lora), rows)
    assert adapters[0].o is not None
    adapters[0].o.b[4, 2, 3] = torch.nan
    wrong = by_row(model.native(library, adapters)(ids, rows, lora), rows)
    for row, place in enumerate(PLACES):
        assert bool(wrong[row].isnan().all()) if place == 4 else torch.equal(wrong[row], right[row])


def test_steps_without_segments_equal_steps_without_adapters(library: Library) -> None:
    model, rows = Model.random(), STEPS[0]
    ids = random_ids(rows)
    plain = model.native(library)(ids, rows)
    for lora in (
        None,
        table_of([]),
        table_of([Segment(3, 0, 9)]),
        table_of([Segment(1, 2, 2)]),
    ):  # place 3 is of rank 0
        assert torch.equal(model.native(library, random_adapters())(ids, rows, lora), plain)


@pytest.mark.parametrize(
    "runs",
    [
        [Segment(5, 0, 1)],
        [Segment(-1, 0, 1)],
        [Segment(0, -1, 1)],
        [Segment(0, 0, 7)],
        [Segment(0, 4, 3)],
        [Segment(0, 0, 3), Segment(1, 2, 4)],
        [Segment(0, 3, 4), Segment(1, 0, 2)],
    ],
)
def test_invalid_segments_are_refused(library: Library, runs: list[Segment]) -> None:
    native = Model.random().native(library, random_adapters())
    with pytest.raises(ValueError, match=r"not at any place|not in the order of tokens"):
        native(torch.zeros(6, dtype=torch.int64), [(6, 6)], table_of(runs))
    assert not native.caches.any()


def test_rows_that_do_not_fit_are_refused(library: Library) -> None:
    native, good = Model.random().native(library, random_adapters()), table_of([Segment(0, 0, 2)])
    step = torch.zeros(6, dtype=torch.int64), [(6, 6)]
    for table in (
        good.table.long(),
        good.table.to("meta"),
        good.table[:, :2],
        good.table.repeat(2, 1),
        good.table.repeat(1, 2)[:, ::2],
    ):
        with pytest.raises(ValueError, match="a table"):
            native(*step, LoRARows(good.runs, table, RANKS))
    for ranks in (RANKS[1:], [*RANKS, 1], [RANK + 1, *RANKS[1:]], [-1, *RANKS[1:]]):
        with pytest.raises(ValueError, match="are of ranks up to 64"):
            native(*step, LoRARows(good.runs, good.table, ranks))
    with pytest.raises(ValueError, match="no layer does"):
        Model.random().native(library)(*step, good)
    assert not native.caches.any()


def test_adapters_that_do_not_fit_are_refused(library: Library) -> None:
    model, good = Model.random(layers=1), random_adapters(layers=1)[0]
    down, gate_up = random_weights("down"), random_weights("gate_up")
    for wrong in (
        good._replace(down=replace(down, a=down.a.double())),
        good._replace(down=replace(down, b=down.b.transpose(1, 2).contiguous().transpose(1, 2))),
        good._replace(down=replace(down, a=down.a[:, 1:].contiguous())),
        good._replace(down=replace(down, b=down.b[:-1])),
        good._replace(down=replace(down, parts=(HIDDEN - 1,))),
        good._replace(down=replace(down, parts=(HIDDEN, 0))),
        good._replace(down=random_weights("down", RANKS[1:])),
        good._replace(down=good.o),
        good._replace(gate_up=replace(gate_up, parts=(INNER - 1, INNER + 1))),
    ):
        with pytest.raises(ValueError, match="adapters"):
            model.native(library, [wrong])
    with pytest.raises(ValueError, match="experts have no adapters"):
        Model.random(layers=1, experts=2).native(library, [good])
    with pytest.raises(ValueError, match="shorter"):
        model.native(library, [])
