"""Options of the ranks of a model: those of one worker, with a share of the devices of their host for each."""

from collections.abc import Callable
from dataclasses import replace

import torch

from tercet.kernels.native.library import available_cores
from tercet.scheduler.device.devices import first_gpu, slow_dtype
from tercet.scheduler.executor.ranks.host_messages import Model
from tercet.scheduler.executor.worker_options import WorkerOptions, encode_options
from tercet.scheduler.model_files import model_identity, served_dtype
from tercet.scheduler.models.layers.shard import Split


def shared_options(
    options: WorkerOptions, size: int, cores: Callable[[], int] = available_cores
) -> list[WorkerOptions]:
    """Return the options of each of rank 0's host's `size` ranks. Raise ValueError if there are too few GPUs.

    All ranks compute in the dtype that the first GPU would use alone, even if it is slow on another. On a CPU each rank
    uses the number of threads in the options, or its share of the cores. Only rank 0 compiles grammars, and only rank 0
    overlaps planning with execution.
    """
    first = first_gpu(options.device)
    shares = _on_gpus(options, first, size) if first is not None else _on_cpu(options, size, cores)
    if first is not None:
        dtype = served_dtype(options.model, options.dtype, slow=slow_dtype(torch.device(shares[0].device)))
        shares[1:] = [replace(share, dtype=dtype) for share in shares[1:]]
    return [shares[0], *map(followed, shares[1:])]


def followed(options: WorkerOptions) -> WorkerOptions:
    """Return the options of a rank other than 0."""
    return replace(options, grammar_backend="none", overlap=False)


def model_of(options: WorkerOptions, device: torch.device, split: Split) -> Model:
    """Return the model of rank 0 for other hosts, without a session."""
    dtype = served_dtype(options.model, options.dtype, slow=slow_dtype(device))
    given = replace(options, dtype=dtype)
    return Model(
        session="",
        options=bytes(encode_options(given)),
        device=device.type,
        fingerprint=fingerprint_of(given),
        count=options.host_ranks,
        shards=split.shards,
        stages=split.stages,
    )


def fingerprint_of(options: WorkerOptions) -> str:
    """Return the fingerprint of the weights here, with a `dtype` that is not "auto". Raise ModelError or OSError."""
    quantization, cached, length = options.quantization, options.kv_cache_dtype, options.context_length
    return model_identity(options.model, options.dtype, quantization, cached, length, options.weights).weights


def host_options(
    options: WorkerOptions, kind: str, device: str, size: int, cores: Callable[[], int] = available_cores
) -> list[WorkerOptions]:
    """Return the options of each of the `size` ranks of another host, on devices of a `kind` from `device` on.

    Raise ValueError if there are too few GPUs.
    """
    if kind == "cuda":
        return _on_gpus(options, int(device.partition(":")[2] or 0), size)
    return _on_cpu(options, size, cores)


def _on_gpus(options: WorkerOptions, first: int, size: int) -> list[WorkerOptions]:
    if (count := torch.cuda.device_count()) < first + size:
        raise ValueError(f"{size} processes from GPU {first} on need as many GPUs: this machine has {count}")
    return [replace(options, device=f"cuda:{first + rank}", host_ranks=size) for rank in range(size)]


def _on_cpu(options: WorkerOptions, size: int, cores: Callable[[], int]) -> list[WorkerOptions]:
    threads = options.threads or max(1, cores() // size)
    return [replace(options, device="cpu", threads=threads, host_ranks=size)] * size
