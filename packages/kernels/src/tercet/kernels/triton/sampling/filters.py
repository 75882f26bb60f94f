"""Filtered draws: one program for each row finds what top-k, top-p and min-p keep of its candidates, and draws.

Each filter keeps a prefix of the tokens ordered by distance below the likeliest and by id. A *bound*, (distance, id),
describes it: tokens before the bound are kept. Top-k's bound is found by bisection. Top-p keeps tokens with less than a
share of `top_p` of all mass before them. It needs no bisection: if the token with the best noisy score is kept, it is
also the best of the kept ones. If it is not, no token after it is kept either, and it is the next bound to draw before.
A draw is accepted with probability `top_p`; a rejected one leaves on average half of the excluded mass.

Candidates are in no order (`candidates`), so masses are added as integers: their sum is the same in every order.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.sampling.scores import (
    FARTHEST,
    NEVER,
    better_of,
    highest_of,
    noise_of,
    scaled_logits,
    score_bounds,
    sharpness,
)

_ONE = tl.constexpr(1 << 40)
"""Mass of the likeliest token."""


@triton.jit
def _tile(logits_ptr, tokens_ptr, values_ptr, listed, first, count, vocab, TILE: tl.constexpr):
    """Return (tokens [TILE], logits [TILE]) of a row: of its list, or of all; -inf beyond the last.

    All pointers point to the row; `count` is the number of listed tokens.
    """
    place = first + tl.arange(0, TILE)
    if listed:
        token = tl.load(tokens_ptr + place, mask=place < count, other=vocab)
        logits = tl.load(values_ptr + place, mask=place < count, other=NEVER)
    else:
        token = place
        logits = tl.load(logits_ptr + place, mask=place < vocab, other=NEVER).to(tl.float32)
    return token, logits


@triton.jit
def _is_before(distance, token, bound, end):
    return (distance < bound) | ((distance == bound) & (token < end))


@triton.jit
def _measure(
    logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, bound, end, vocab, TILE: tl.constexpr
):  # fmt: skip
    """Return (number, mass int64) of the tokens before a bound."""
    number, mass = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    for first in range(0, tl.where(listed, count, vocab), TILE):
        token, logits = _tile(logits_ptr, tokens_ptr, values_ptr, listed, first, count, vocab, TILE)
        scaled, distance = scaled_logits(logits, highest, temperature)
        kept = _is_before(distance, token, bound, end)
        number += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(scaled) * _ONE, 0.0).to(tl.int64), 0)
    return number, mass


@triton.jit
def _first_of(
    logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, reach, top_k, vocab, TILE: tl.constexpr
):  # fmt: skip
    """Return the bound of the first `top_k` tokens, of which there are more before the distance `reach`."""
    low, high = tl.zeros([], tl.int32), reach  # fewer than top_k before `low`, at least top_k before `high`
    number = tl.zeros([], tl.int32)  # of tokens before `low`
    exact = False
    while (high - low > 1) & (not exact):
        middle = low + (high - low) // 2
        found, _ = _measure(
            logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, middle, 0, vocab, TILE
        )
        exact = found == top_k
        number = tl.where(found < top_k, found, number)
        low, high = tl.where(found < top_k, middle, low), tl.where(found < top_k, high, middle)
    bound, end = tl.where(exact, high, low), tl.zeros([], tl.int32)
    if not exact:  # the last ones kept are at the distance `low`, and have the lowest ids of those
        above = vocab + tl.zeros([], tl.int32)
        while above - end > 1:
            middle = end + (above - end) // 2
            found, _ = _measure(
                logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, low, middle, vocab, TILE
            )
            end, above = tl.where(found < top_k, middle, end), tl.where(found < top_k, above, middle)
        end = above
    return bound, end


@triton.jit
def _draw(
    logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, bound, end, noise, vocab,
    TILE: tl.constexpr,
):  # fmt: skip
    """Return the best token before a bound; -1 without one."""
    best, winner = tl.full([], NEVER, tl.float64), tl.full([], -1, tl.int32)
    for first in range(0, tl.where(listed, count, vocab), TILE):
        token, logits = _tile(logits_ptr, tokens_ptr, values_ptr, listed, first, count, vocab, TILE)
        _, distance = scaled_logits(logits, highest, temperature)
        kept = _is_before(distance, token, bound, end)
        bounds = tl.where(kept, score_bounds(token, logits, highest, temperature, noise), NEVER)
        best, winner = better_of(token, bounds, best, winner, logits_ptr, highest, temperature, noise, vocab)
    return winner


@triton.jit
def _whole_mass(bests_ptr, sums_ptr, row, blocks, highest, temperature, BLOCKS: tl.constexpr):
    """Return the mass of all tokens of a row, float64."""
    block = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + row * blocks + block, mask=block < blocks, other=0.0)
    bests = tl.load(bests_ptr + row * blocks + block, mask=block < blocks, other=NEVER)
    return tl.sum((sums * tl.exp2((bests - highest) * sharpness(temperature))).to(tl.float64), 0) * _ONE


@triton.jit
def _floor_of(min_p):
    """Return the distance from which on min-p keeps nothing."""
    floor = tl.full([], FARTHEST, tl.int32)
    if min_p > 0:
        floor = (-tl.log(min_p.to(tl.float64)).to(tl.float32)).to(tl.int32, bitcast=True) + 1
    return floor


@triton.jit
def _source_of(
    logits_ptr, tokens_ptr, values_ptr, count, cut, highest, temperature, top_k, top_p, floor, total, vocab,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (whether the list of a row suffices, a distance before which all tokens are known, how many these are).

    The number is that of a row with top-k.
    """
    listed, reach = count <= CAPACITY, tl.full([], FARTHEST, tl.int32)
    number, mass = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    if listed:
        _, reach = scaled_logits(cut, highest, temperature)
        number, mass = _measure(
            logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, reach, 0, vocab, TILE
        )
        listed = cut == NEVER
        if top_k > 0:
            listed |= number >= top_k
        else:
            listed |= (floor <= reach) | ((top_p < 1) & (mass.to(tl.float64) >= top_p.to(tl.float64) * total))
    if not listed:
        reach = tl.full([], FARTHEST, tl.int32)
        if top_k > 0:
            number, _ = _measure(
                logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, reach, 0, vocab, TILE
            )
    return listed, reach, number


@triton.jit(
    do_not_specialize=[
        *("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"),
        *("seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr"),
    ]
)
def choose_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_low_ptr, seed_high_ptr, choice_ptr,
    position_ptr, cuts_ptr, counts_ptr, tokens_ptr, values_ptr, bests_ptr, sums_ptr,
    drawn_ptr,  # int64 [rows]: output
    vocab, stride, blocks,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the token that one row draws; -1 without one."""
    row = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    drawn = tl.full([], -1, tl.int32)
    if tl.abs(highest) < float("inf"):
        temperature, count = tl.load(temperature_ptr + row), tl.load(counts_ptr + row)
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab).to(tl.int32)
        top_p, floor = tl.load(top_p_ptr + row), _floor_of(tl.load(min_p_ptr + row))
        total = _whole_mass(bests_ptr, sums_ptr, row, blocks, highest, temperature, BLOCKS)
        logits_ptr += row * stride
        tokens_ptr += row * CAPACITY
        values_ptr += row * CAPACITY
        listed, bound, number = _source_of(
            logits_ptr, tokens_ptr, values_ptr, count, tl.load(cuts_ptr + row), highest, temperature, top_k, top_p,
            floor, total, vocab, CAPACITY, TILE,
        )  # fmt: skip
        end = tl.zeros([], tl.int32)
        if (top_k > 0) & (number > top_k):
            bound, end = _first_of(
                logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, bound, top_k, vocab, TILE
            )
        if (top_k > 0) & (top_p < 1):
            _, mass = _measure(
                logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, bound, end, vocab, TILE
            )
            total = mass.to(tl.float64)
        end = tl.where(floor <= bound, 0, end)
        bound = tl.minimum(bound, floor)
        noise = noise_of(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row)
        accepted = False
        while not accepted:
            drawn = _draw(
                logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, bound, end, noise, vocab, TILE
            )
            accepted = (top_p >= 1) | (drawn < 0)
            if not accepted:
                _, bound = scaled_logits(tl.load(logits_ptr + drawn), highest, temperature)
                end = drawn
                number, mass = _measure(
                    logits_ptr, tokens_ptr, values_ptr, listed, count, highest, temperature, bound, end, vocab, TILE
                )
                # the likeliest token has none before it, and is always kept
                accepted = (mass.to(tl.float64) < top_p.to(tl.float64) * total) | (number == 0)
    tl.store(drawn_ptr + row, drawn.to(tl.int64))
