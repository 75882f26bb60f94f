"""Long prompts by a kernel of torch's, beside rows that another backend computes, against the naive reference."""

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from packages.kernels.tests.attention.test_backends import PAGE, make_batch
from tercet.kernels.attention import prompts
from tercet.kernels.attention.api import AttentionParams, NewTokens, RotatingBackend
from tercet.kernels.attention.prompts import (
    Kernel,
    PromptAttention,
    is_right,
    long_prompts,
    missing_cudnn,
    padded_length,
    sdpa,
    without_rows,
)
from tercet.kernels.attention.reference import ReferenceAttention
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.errors import UnavailableBackendError

CPU = torch.device("cpu")
LEAST = 6
MATH = sdpa(SDPBackend.MATH)


class Plain(TorchNativeAttention):
    """Plain torch, counted, as a backend that rotates."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[int]()

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        self.calls.append(len(q))
        return super().attend(q, k_cache, v_cache, params, key_scale)

    def attend_new(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: NewTokens, params: AttentionParams
    ) -> torch.Tensor:
        return q + new.eps


class Counted:
    """Kernel that counts the tokens of its calls."""

    def __init__(self, kernel: Kernel = MATH) -> None:
        self.kernel, self.lengths = kernel, list[int]()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self.lengths.append(q.shape[2])
        assert k.shape[2] == v.shape[2] == q.shape[2]
        return self.kernel(q, k, v, scale)


CASES = {
    "a prompt alone": ((40, 40),),
    "two prompts": ((9, 9), (30, 30)),
    "beside decodes": ((1, 5), (1, 33), (12, 12)),
    "beside a chunk": ((1, 5), (20, 20), (7, 19), (6, 6)),
    "before the rest": ((16, 16), (5, 5), (3, 40)),
}


def given(
    rows: tuple[tuple[int, int], ...], dtype: torch.dtype = torch.float16, cached: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and caches."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 256, PAGE, 2, 8).to(cached or dtype).unbind()
    return torch.randn(sum(new for new, _ in rows), 4, 8).to(dtype), k, v


def reference(
    rows: tuple[tuple[int, int], ...],
    params: AttentionParams,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float = 1.0,
) -> torch.Tensor:
    exact = ReferenceAttention()
    exact.plan(make_batch(rows, 256))
    return exact.attend(*tensors, params, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
def test_equals_the_reference(rows: tuple[tuple[int, int], ...], dtype: torch.dtype) -> None:
    kernel, made = Counted(), list[Plain]()

    def make() -> Plain:
        made.append(Plain())
        return made[-1]

    backend, tensors = PromptAttention(make, kernel, LEAST), given(rows, dtype)
    assert isinstance(backend, RotatingBackend)
    for _ in range(2):
        backend.plan(make_batch(rows, 256))
        params = AttentionParams(scale=0.4)
        out = backend.attend(*tensors, params)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(out, reference(rows, params, tensors), rtol=2 * step, atol=2 * step)
    long = [new for new, kept in rows if new == kept >= LEAST]
    assert kernel.lengths[1:] == [padded_length(length) for length in long] * 2, "the first is the trial"
    left = sum(new for new, _ in rows) - sum(long)
    assert [each.calls for each in made] == [[], [left] * 2 if left else []]


def test_a_cache_in_8_bits_is_widened_and_scaled() -> None:
    rows = CASES["beside a chunk"]
    tensors = given(rows, cached=torch.float8_e4m3fn)
    backend = PromptAttention(Plain, MATH, LEAST)
    backend.plan(make_batch(rows, 256))
    params = AttentionParams(scale=0.1)
    out = backend.attend(*tensors, params, 0.5)
    torch.testing.assert_close(out, reference(rows, params, tensors, 0.5), rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(scale=0.4, window=4),
        AttentionParams(scale=0.4, softcap=2.0),
        AttentionParams(scale=0.4, sinks=torch.ones(4)),
    ],
    ids=["window", "softcap", "sinks"],
)
def test_layers_that_the_kernel_does_not_know_are_the_others(params: AttentionParams) -> None:
    rows, kernel = CASES["beside a chunk"], Counted()
    tensors = given(rows)
    backend = PromptAttention(Plain, kernel, LEAST)
    backend.plan(make_batch(rows, 256))
    plain = backend.attend(*tensors, AttentionParams(scale=0.4))
    before = len(kernel.lengths)
    torch.testing.assert_close(backend.attend(*tensors, params), reference(rows, params, tensors), rtol=3e-3, atol=3e-3)
    assert len(kernel.lengths) == before
    assert torch.equal(backend.attend(*tensors, AttentionParams(scale=0.4)), plain), "the plan of the rest holds"


def test_nan_of_other_texts_in_a_page_is_never_seen() -> None:
    rows = ((9, 9), (1, 5))[::-1]
    batch, (q, k, v) = make_batch(rows, 256), given(rows)
    for cache in (k, v):
        kept = cache.clone()
        cache.fill_(float("nan"))
        for row, (_, length) in enumerate(rows):
            for place in range(length):
                page = batch.page_table[row, place // PAGE]
                cache[page, place % PAGE] = kept[page, place % PAGE]
    backend = PromptAttention(Plain, MATH, LEAST)
    backend.plan(batch)
    assert backend.attend(q, k, v, AttentionParams(scale=0.4)).isfinite().all()


def test_images_whose_tokens_see_each_other_are_no_such_prompts() -> None:
    batch = make_batch(((40, 40),), 256)
    assert long_prompts(batch, 40) == [0]
    assert long_prompts(batch, 41) == []
    assert long_prompts(replace(batch, seen=torch.arange(1, 41)), 40) == []


def test_a_prompt_after_a_prefix_reads_pages() -> None:
    assert long_prompts(make_batch(((1, 1), (30, 31), (30, 30)), 256), 1) == [0, 2]


def test_the_rest_of_a_batch_has_its_own_tokens_and_pages() -> None:
    batch = make_batch(((1, 5), (12, 12), (7, 19)), 256)
    rest, tokens = without_rows(batch, [1])
    assert tokens.tolist() == [0, *range(13, 20)]
    assert rest.query_start.tolist() == [0, 1, 8]
    assert rest.query_start.dtype == torch.int32
    assert rest.host_query_lens == [1, 7]
    assert rest.kv_lens.tolist() == rest.host_kv_lens == [5, 19]
    assert torch.equal(rest.page_table, batch.page_table[[0, 2]])
    assert torch.equal(rest.slot_mapping, batch.slot_mapping[tokens])
    assert rest.decodes == 1


def test_lengths_are_padded_to_few() -> None:
    lengths = [padded_length(length) for length in range(1, 16385)]
    assert all(0 <= padded - length < max(16, length / 16) for length, padded in enumerate(lengths, 1))
    assert [padded_length(length) for length in (2048, 2049, 4097, 8192)] == [2048, 2176, 4352, 8192]
    assert len({padded for padded in lengths if 2048 < padded <= 4096}) == 16
    assert all(first <= second for first, second in itertools.pairwise(lengths))


def test_a_wrong_kernel_is_left_to_the_other_backend(caplog: pytest.LogCaptureFixture) -> None:
    """It sees the tokens after each one, too."""

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    rows, kernel = CASES["beside decodes"], Counted(wrong)
    tensors, backend = given(rows), PromptAttention(Plain, kernel, LEAST)
    params = AttentionParams(scale=0.4)
    for _ in range(2):
        backend.plan(make_batch(rows, 256))
        out = backend.attend(*tensors, params)
        torch.testing.assert_close(out, reference(rows, params, tensors), rtol=3e-3, atol=3e-3)
    assert kernel.lengths == [prompts._TRIED]
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith("heads=4 kv_heads=2 dim=8")


def test_a_kernel_that_refuses_is_left_to_the_other_backend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert not is_right(sdpa(SDPBackend.CUDNN_ATTENTION), torch.empty(1, 4, 8, dtype=torch.float16), 2, 8)
    assert "refused: heads=4 kv_heads=2 dim=8: " in caplog.text


@pytest.mark.parametrize("dim", [12, 136])
def test_odd_and_wide_heads_are_the_others(dim: int) -> None:
    kernel = Counted()
    backend = PromptAttention(Plain, kernel, LEAST)
    backend.plan(make_batch(((9, 9),), 256))
    q, cache = torch.randn(9, 2, dim).half(), torch.randn(256, PAGE, 2, dim).half()
    assert backend.attend(q, cache, cache, AttentionParams(scale=0.1)).shape == q.shape
    assert kernel.lengths == []


def test_float32_is_the_others() -> None:
    kernel, rows = Counted(), CASES["a prompt alone"]
    backend = PromptAttention(Plain, kernel, LEAST)
    backend.plan(make_batch(rows, 256))
    backend.attend(*given(rows, torch.float32), AttentionParams(scale=0.1))
    assert kernel.lengths == []


def test_it_is_chosen_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, said in (((9, 0), ""), ((8, 0), "it has not been measured on sm80")):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert missing_cudnn(torch.device("cuda")) == said
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert missing_cudnn(torch.device("cuda")) == "this build of torch has no cuDNN"
    with pytest.raises(UnavailableBackendError, match="'cudnn': it does not run on cpu"):
        attention_backend("cudnn", CPU)
