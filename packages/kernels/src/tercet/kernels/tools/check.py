"""Check of every operation on a small case against its definition: `tercet-kernels check`."""

from collections.abc import Callable

import torch

from tercet.kernels.attention.api import AttentionBatch, AttentionParams
from tercet.kernels.attention.latent import LatentSizes, latent_caches
from tercet.kernels.attention.reference import ReferenceAttention, ReferenceLatent
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.device import has_failed
from tercet.kernels.errors import DeviceFailedError, UnavailableBackendError
from tercet.kernels.ops.activation import gelu_and_mul, silu_and_mul
from tercet.kernels.ops.bitmask import apply_bitmask, pack_bitmask
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.kernels.ops.penalties import Penalties, apply_penalties
from tercet.kernels.ops.philox import NoiseKey, gumbel, gumbel_reference
from tercet.kernels.ops.rmsnorm import rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.kernels.ops.sampling import Filters, sample
from tercet.kernels.ops.store_kv import store_kv

Pair = tuple[torch.Tensor, torch.Tensor]
"""Actual and expected result."""


def make_batch(rows: list[tuple[int, int]], page_size: int, device: torch.device) -> AttentionBatch:
    """Return a batch of rows (new tokens, tokens after the step), each with its own pages, in order."""
    lengths = [-(-kv_len // page_size) for _, kv_len in rows]
    table = torch.zeros(len(rows), max(lengths), dtype=torch.int32)
    slots = []
    for row, (new, kv_len) in enumerate(rows):
        first = sum(lengths[:row])
        table[row, : lengths[row]] = torch.arange(first, first + lengths[row])
        slots.append(first * page_size + torch.arange(kv_len - new, kv_len))
    query_lens = [new for new, _ in rows]
    return AttentionBatch(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        kv_lens=torch.tensor([kv_len for _, kv_len in rows], dtype=torch.int32, device=device),
        page_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        page_size=page_size,
        host_query_lens=query_lens,
        host_kv_lens=[kv_len for _, kv_len in rows],
    )


def check_attention(name: str, device: torch.device) -> Pair:
    """Check a mixed batch with a window, a softcap and sinks. Raises the error of a backend that cannot run here."""
    batch = make_batch([(1, 9), (1, 30), (5, 5), (6, 20)], 4, device)
    pages = int(batch.page_table.max()) + 1
    q = torch.randn(13, 6, 16, device=device)
    k, v = torch.randn(2, pages, 4, 2, 16, device=device).unbind()
    params = AttentionParams(scale=0.25, window=7, softcap=5.0, sinks=torch.linspace(-1, 1, 6, device=device))
    outputs = []
    for backend in (attention_backend(name, device)(), ReferenceAttention()):
        backend.plan(batch)
        outputs.append(backend.attend(q, k, v, params).to(device))
    return outputs[0], outputs[1]


def check_latent(name: str, device: torch.device) -> Pair:
    """Check a mixed batch over vectors of 40 elements. Raises the error of a backend that cannot run here."""
    batch = make_batch([(1, 9), (1, 30), (5, 5), (6, 20)], 4, device)
    q, cache = torch.randn(13, 6, 40, device=device), torch.randn(int(batch.page_table.max()) + 1, 4, 40, device=device)
    sizes = LatentSizes(rank=24, rope=16, dtype=q.dtype, cached=cache.dtype)
    outputs = []
    for backend in (attention_backend(name, device, sizes)(), ReferenceLatent()):
        backend.plan(batch)
        outputs.append(backend.attend(q, *latent_caches(cache, 24), AttentionParams(scale=0.15)).to(device))
    return outputs[0], outputs[1]


def _rmsnorm(device: torch.device) -> Pair:
    x, weight = torch.randn(5, 32, device=device), torch.randn(32, device=device)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return rmsnorm(x, weight, 1e-5), expected.float()


def _rope(device: torch.device) -> Pair:
    q, positions = torch.randn(7, 2, 16, device=device), torch.arange(0, 21, 3, device=device)
    actual, _ = apply_rope(q, q, positions, rope_cache(32, 16, 100.0).to(device))
    angles = positions.double()[:, None, None] * 100.0 ** (-torch.arange(8, device=device).double() / 8)
    turned = torch.complex(*q.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return actual, torch.cat([turned.real, turned.imag], dim=-1).float()


def _activation(device: torch.device) -> Pair:
    x = torch.randn(5, 32, device=device)
    gate, up = x.double().chunk(2, dim=-1)
    gelu = gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    return torch.cat([silu_and_mul(x), gelu_and_mul(x)]), torch.cat([gate / (1 + (-gate).exp()) * up, gelu]).float()


def _store_kv(device: torch.device) -> Pair:
    k, cache = torch.randn(3, 2, 4, device=device), torch.zeros(3, 4, 2, 4, device=device)
    expected = cache.clone()
    store_kv(k, k, cache, torch.zeros_like(cache), torch.tensor([9, 2, 7], device=device))
    expected[2, 1], expected[0, 2], expected[1, 3] = k
    return cache, expected


def _philox(device: torch.device) -> Pair:
    tokens = torch.arange(50, device=device)
    expected = [gumbel_reference(7 + (9 << 32), 2, 3, token) for token in range(50)]
    return gumbel(_key(device), torch.zeros_like(tokens), tokens), torch.tensor(expected, device=device)


def _sampling(device: torch.device) -> Pair:
    logits = torch.randn(1, 50, device=device)
    filters = Filters(*torch.tensor([[20.0], [0.9], [0.05]], device=device))
    token = sample(logits, torch.ones(1, device=device), filters, _key(device))
    order = logits[0].double().sort(descending=True).indices[:20]
    probabilities = logits[0].double()[order].softmax(0)
    kept = (probabilities.cumsum(0) - probabilities < 0.9) & (probabilities >= 0.05 * probabilities[0])
    noise = torch.tensor([gumbel_reference(7 + (9 << 32), 2, 3, int(t)) for t in order], device=device)
    return token, order[(probabilities.log() + noise).masked_fill(~kept, -torch.inf).argmax()].reshape(1)


def _penalties(device: torch.device) -> Pair:
    logits, counts = torch.tensor([[2.0, -2.0, 1.0]], device=device), torch.tensor([[0, 2, 1]], device=device)
    strengths = [torch.tensor([value], device=device) for value in (2.0, 0.5, 0.25)]
    penalties = Penalties(repetition=strengths[0], frequency=strengths[1], presence=strengths[2])
    actual = apply_penalties(logits, counts, torch.tensor([[True, False, False]], device=device), penalties)
    return actual, torch.tensor([[1.0, -5.25, -0.25]], device=device)


def _logprobs(device: torch.device) -> Pair:
    logits = torch.randn(4, 30, device=device)
    chosen, _, top = token_logprobs(logits, torch.arange(4, device=device), 5)
    expected = logits.double().log_softmax(-1)
    best = expected.sort(-1, descending=True).values[:, :5]
    return torch.cat([chosen[:, None], top], 1), torch.cat([expected.diagonal()[:, None], best], 1).float()


def _bitmask(device: torch.device) -> Pair:
    logits = torch.randn(2, 45, device=device)
    allowed = torch.arange(45, device=device) % torch.tensor([[2], [3]], device=device) == 0
    return apply_bitmask(logits, pack_bitmask(allowed)), torch.where(allowed, logits, -torch.inf)


def _key(device: torch.device) -> NoiseKey:
    return NoiseKey(*torch.tensor([[7], [9], [2], [3]], device=device))


OPS: dict[str, Callable[[torch.device], Pair]] = {
    "rmsnorm": _rmsnorm,
    "rope": _rope,
    "activation": _activation,
    "store_kv": _store_kv,
    "philox": _philox,
    "sampling": _sampling,
    "penalties": _penalties,
    "logprobs": _logprobs,
    "bitmask": _bitmask,
}


def verdict(run: Callable[[], Pair]) -> str:
    """Return an empty string if a check passes, otherwise the reason in one line.

    Raises UnavailableBackendError if the operation cannot run here, which is no failure, and DeviceFailedError if the
    device is left in a state that invalidates later checks of this process.
    """
    torch.manual_seed(0)
    try:
        actual, expected = run()
        rounding = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0
        tolerance = max(1e-4, 4 * rounding)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    except UnavailableBackendError:
        raise
    except Exception as error:
        trouble = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if has_failed(error):
            raise DeviceFailedError(trouble) from error
        return trouble
    return ""
