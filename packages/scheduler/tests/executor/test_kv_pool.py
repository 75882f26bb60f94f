from dataclasses import replace
from typing import Any

import pytest
import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.core.plan import PageCopy
from tercet.scheduler.executor.forward_batch import ForwardMode
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape

CPU = torch.device("cpu")
SHAPE = KVShape(page_size=4, kv_heads=2, head_dim=3, dtype=torch.float16)


def numbered_pool() -> KVPool:
    """Every page of every layer holds a number of its own; values are the keys' negatives."""
    groups = [
        KVGroup(name="full", layers={0: SHAPE, 2: replace(SHAPE, kv_heads=1, head_dim=5, value_dim=2)}, pages=6),
        KVGroup(name="window", layers={1: SHAPE}, pages=5, window=8),
    ]
    pool = KVPool(groups, torch.device("cpu"))
    for layer in range(3):
        keys, values = pool.layer(layer)
        for page in range(len(keys)):
            keys[page], values[page] = 10 * layer + page + 1, -(10 * layer + page + 1)
    return pool


def numbers(pool: KVPool, layer: int) -> list[int]:
    keys, values = pool.layer(layer)
    assert torch.equal(keys[..., :2], -values[..., :2])
    assert torch.equal(keys, keys[:, :1, :1, :1].expand_as(keys))
    return keys[:, 0, 0, 0].int().tolist()


def test_a_page_is_copied_in_every_layer_of_its_group_only() -> None:
    pool = numbered_pool()
    pool.copy_pages([PageCopy(0, 1, 4), PageCopy(1, 0, 2)])
    assert numbers(pool, 0) == [1, 2, 3, 4, 2, 6]
    assert numbers(pool, 2) == [21, 22, 23, 24, 22, 26]
    assert numbers(pool, 1) == [11, 12, 11, 14, 15]


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([], [1, 2, 3, 4, 5, 6]),
        ([(0, 1), (0, 2), (0, 3)], [1, 1, 1, 1, 5, 6]),
        ([(0, 1), (1, 2), (2, 3)], [1, 1, 1, 1, 5, 6]),
        ([(0, 3), (1, 3), (3, 4)], [1, 2, 3, 2, 2, 6]),
        ([(5, 0), (1, 5)], [6, 2, 3, 4, 5, 2]),
    ],
)
def test_copies_apply_in_order(copies: list[tuple[int, int]], expected: list[int]) -> None:
    pool = numbered_pool()
    pool.copy_pages([PageCopy(0, source, target) for source, target in copies])
    assert numbers(pool, 0) == expected


def test_bytes_are_those_of_the_tensors() -> None:
    pool = numbered_pool()
    tensors = [tensor for layer in range(3) for tensor in pool.layer(layer)]
    assert pool.bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    assert pool.group_of == {0: 0, 2: 0, 1: 1}


def test_layers_have_one_page_size_and_dtype() -> None:
    layers = {0: SHAPE, 1: replace(SHAPE, dtype=torch.float32)}
    with pytest.raises(ValueError, match="layers differ in page size or dtype"):
        KVPool([KVGroup(name="full", layers=layers, pages=1)], CPU)


def test_modes() -> None:
    assert ForwardMode.of([1, 1]) is ForwardMode.DECODE
    assert ForwardMode.of([3, 2]) is ForwardMode.EXTEND
    assert ForwardMode.of([1, 2]) is ForwardMode.MIXED


def test_8_bits_take_half_of_16_and_are_copied() -> None:
    small = replace(SHAPE, dtype=torch.float8_e4m3fn)
    pool, wide = (KVPool([KVGroup(name="full", layers={0: shape}, pages=4)], CPU) for shape in (small, SHAPE))
    assert pool.bytes * 2 == wide.bytes
    k = torch.arange(12.0).view(2, 2, 3)
    pool.store(0, k, -k, torch.tensor([5, 6]))
    pool.copy_pages([PageCopy(0, 1, 3), PageCopy(0, 3, 0)])
    for cache, sign in zip(pool.layer(0), (1, -1), strict=True):
        assert torch.equal(cache[0, 1:3].float(), sign * k)


def test_scales_are_of_8_bits_alone() -> None:
    with pytest.raises(ValueError, match=r"keys and values in torch\.float16 have no scales"):
        KVPool([KVGroup(name="full", layers={0: SHAPE}, pages=1)], CPU, scales={0: (1.0, 2.0)})


def test_attention_sees_the_multiples_of_the_scales(steps: Any) -> None:
    """Over a pool of 8 bits it is that over wide caches of what was stored, also with a soft cap and a window."""
    served, scales = steps(), (0.5, 0.03)
    small = replace(served.pool.shapes[0], dtype=torch.float8_e4m3fn)
    layer = KVGroup(name="full", layers={0: small}, pages=len(served.pool.layer(0)[0]))
    pool = KVPool([layer], CPU, scales={0: scales})
    served.pool = pool
    batch = served.step([(0, 6, 6), (1, 3, 3)])
    q, k, v = torch.randn(3, 9, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    for params in (AttentionParams(scale=0.7), AttentionParams(scale=0.7, softcap=2.0, window=2)):
        out = batch.attend(0, q, k[:, :1] * 9, v[:, :1], params)
        meant = [cache.float() * scale for cache, scale in zip(pool.layer(0), scales, strict=True)]
        expected = served.backend.attend(q, *meant, params)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert (meant[0].flatten(0, 1)[batch.attention[0].slot_mapping] - k[:, :1] * 9).abs().max() < 1


def test_values_within_keys_take_no_memory_and_are_copied_along() -> None:
    once = replace(SHAPE, kv_heads=1, rank=2)
    shapes = once, replace(once, rank=0)
    pool, twice = (KVPool([KVGroup(name="full", layers={0: shape}, pages=4)], CPU) for shape in shapes)
    assert pool.bytes * 2 == twice.bytes
    assert pool.bytes == pool.layer(0)[0].nbytes
    k = torch.arange(6.0).view(2, 1, 3)
    pool.store(0, k, k[..., :2], torch.tensor([5, 6]))
    pool.copy_pages([PageCopy(0, 1, 3), PageCopy(0, 3, 0)])
    keys, values = pool.layer(0)
    assert torch.equal(keys[0, 1:3].float(), k)
    assert torch.equal(values[0, 1:3].float(), k[..., :2])
