import torch

from tercet.kernels.ops.store_kv import E4M3, store_kv


def test_each_token_lands_in_its_slot_and_nothing_else_moves() -> None:
    page_size, pages = 4, 3
    k_cache, v_cache = torch.zeros(pages, page_size, 2, 5), torch.zeros(pages, page_size, 2, 5)
    k, v = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    slots = [9, 2, 7]
    store_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    for token, slot in enumerate(slots):
        assert torch.equal(k_cache[slot // page_size, slot % page_size], k[token])
        assert torch.equal(v_cache[slot // page_size, slot % page_size], v[token])
    used = torch.tensor(slots)
    assert k_cache.flatten(0, 1).index_fill(0, used, 0).abs().sum() == 0
    assert v_cache.flatten(0, 1).index_fill(0, used, 0).abs().sum() == 0


def test_the_cache_keeps_its_own_dtype() -> None:
    cache = torch.zeros(1, 2, 1, 1, dtype=torch.bfloat16)
    store_kv(torch.tensor([[[1.5]]]), torch.tensor([[[2.5]]]), cache, cache.clone(), torch.tensor([1]))
    assert cache.flatten().tolist() == [0.0, 1.5]


def test_a_cache_of_8_bits_saturates_and_has_scales() -> None:
    k_cache, v_cache = torch.zeros(2, 2, 1, 2, dtype=E4M3), torch.zeros(2, 2, 1, 2, dtype=E4M3)
    k = torch.tensor([[[1.0, 1000.0]], [[-1e30, 0.3]]])
    v = torch.tensor([[[1.0, torch.inf]], [[torch.nan, 8.5]]])
    store_kv(k, v, k_cache, v_cache, torch.tensor([3, 0]), (1.0, 0.25))
    assert k_cache[1, 1].tolist() == [[1.0, 448.0]]
    assert k_cache[0, 0].tolist() == [[-448.0, 0.3125]]  # 0.3 lies between 0.28125 and 0.3125
    assert v_cache[1, 1].tolist() == [[4.0, 448.0]]
    assert v_cache[0, 0, 0, 0].isnan()
    assert v_cache[0, 0, 0, 1].item() == 32.0  # 34 is a tie between 32 and 36: the even one
    assert not k_cache.float()[[0, 1], [1, 0]].any()


def test_keys_are_stored_to_half_a_step() -> None:
    torch.manual_seed(0)
    cache = torch.zeros(25, 4, 2, 8, dtype=E4M3)
    k = torch.randn(100, 2, 8) * 2
    store_kv(k, k, cache, cache, torch.arange(100), (0.02, 0.02))
    back = cache.float().view(k.shape) * 0.02
    assert ((back - k).abs() <= (k.abs() * 2**-4).clamp(min=0.02 * 2**-10) * 1.0001).all()
