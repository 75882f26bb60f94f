"""The attention backends that fit a model's layers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.chunked import ChunkedAttention
from tercet.kernels.attention.cpu import CpuAttention
from tercet.kernels.attention.latent import LatentSizes
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.ops.store_kv import E4M3
from tercet.scheduler.executor.kv_pool import KVShape
from tercet.scheduler.executor.worker_options import KV_DTYPES, WorkerOptions
from tercet.scheduler.models.config.model_config import DecoderShape, ModelConfig

logger = logging.getLogger(__name__)


def backend_of(
    options: WorkerOptions,
    device: torch.device,
    config: DecoderShape,
    shapes: Mapping[int, KVShape],
    plain: Callable[[], AttentionBackend],
) -> Callable[[], AttentionBackend]:
    """Return the factory of a model's backends, from that of `plain` attention. Raise ValueError for an
    unsupported one.
    """
    if latents := [shape for shape in shapes.values() if shape.rank]:
        return _latent_backend(options, device, latents[0], config.dtype)
    if any(shape.value_size != shape.head_dim for shape in shapes.values()):
        return _uneven_backend(options, plain)
    if chunks := _chunks(options, config):
        logger.info("chunked attention: sizes=%s", chunks)
        return partial(ChunkedAttention, plain)
    return plain


def _uneven_backend(options: WorkerOptions, plain: Callable[[], AttentionBackend]) -> Callable[[], AttentionBackend]:
    """Return the factory of backends for values of another size than keys. Raise ValueError for an unsupported one."""
    if plain not in (CpuAttention, TorchNativeAttention) and options.attention_backend != "auto":
        raise ValueError(f"attention backend {options.attention_backend!r}: it takes no values smaller than keys")
    logger.warning("values are smaller than keys: attention runs on torch, which is slower")
    return TorchNativeAttention


def _latent_backend(
    options: WorkerOptions, device: torch.device, shape: KVShape, dtype: torch.dtype
) -> Callable[[], AttentionBackend]:
    """Return a backend factory for latent attention. Raise ValueError for an unsupported one."""
    if KV_DTYPES.get(options.kv_cache_dtype) == E4M3:
        raise ValueError(f"kv_cache_dtype {options.kv_cache_dtype}: latents are not cached in 8 bits")
    try:
        rope = shape.head_dim - shape.rank
        sizes = LatentSizes(rank=shape.rank, rope=rope, dtype=dtype, cached=shape.dtype)
        return attention_backend(options.attention_backend, device, sizes)
    except UnavailableBackendError as error:
        raise ValueError(str(error)) from error


def _chunks(options: WorkerOptions, config: DecoderShape) -> Sequence[int]:
    """Return the sizes of a model's chunks. Raise ValueError for one that is no multiple of the page size."""
    if not isinstance(config, ModelConfig):
        return []
    sizes = sorted({*map(config.chunk_of, config.chunks)} - {0})
    if uneven := [size for size in sizes if size % options.page_size]:
        raise ValueError(f"page_size {options.page_size} does not divide attention_chunk_size {uneven[0]}")
    return sizes
