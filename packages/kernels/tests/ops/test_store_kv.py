import torch

from tercet.kernels.ops.store_kv import store_kv


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
