"""Factory of the executors (`ports.Executor`), by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tercet.protocol.messages.values import Task
from tercet.protocol.system.process import gc_disabled_during_imports
from tercet.scheduler.architectures import is_ours, text_architecture
from tercet.scheduler.config import ConfigError, ExpertOptions, ModelOptions, ScheduleOptions
from tercet.scheduler.core.plan import CacheGroup, Capacity
from tercet.scheduler.executor.ranks.host_network import HostNetwork
from tercet.scheduler.gguf_models import config_directory, served_name
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.ports import Advance, Executor
from tercet.scheduler.resolved_model import ResolvedModel, on_gpu
from tercet.scheduler.weight_transfer.weight_transfers import NoUpdateGroups, UpdateGroups

if TYPE_CHECKING:
    from tercet.scheduler.executor.worker_options import WorkerOptions

ReportBytes = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in total) while weights load."""


def build_torch(
    options: ModelOptions,
    schedule: ScheduleOptions,
    found: ResolvedModel,
    report: ReportBytes,
    advance: Advance,
    network: HostNetwork | None = None,
    experts: ExpertOptions = ExpertOptions(),
) -> Executor:
    """Return an executor that computes with torch, over several ranks and hosts if the options say so."""
    with gc_disabled_during_imports():
        from tercet.scheduler.executor.tp_worker import TpModelWorker
        from tercet.scheduler.models.layers.shard import Split

    if options.pipeline_parallel_size > 1:
        schedule.check_stages(options.pipeline_parallel_size)
    if options.kv_cache_bytes is not None and schedule.mem_fraction_static is not None:
        raise ConfigError("--mem-fraction-static and --kv-cache-bytes both size the KV cache: give one of them")
    split = Split(options.tensor_parallel_size, options.pipeline_parallel_size)
    architecture = text_architecture(read_json(found.path / "config.json"))
    if split.ranks > 1 and not is_ours(architecture):
        raise ConfigError(f"{options.split_flags}: {architecture} is transformers' own, and never shared")
    worker = _worker_options(options, schedule, experts, found, gpu=on_gpu(options))
    if split.ranks == 1 and network is None:
        return TpModelWorker(worker, report, advance)
    from tercet.scheduler.executor.ranks.ranks import Ranks

    return Ranks(worker, split, report, advance, network=network, load_file=experts.expert_load_file)


def _worker_options(
    options: ModelOptions, schedule: ScheduleOptions, experts: ExpertOptions, found: ResolvedModel, *, gpu: bool
) -> "WorkerOptions":
    from tercet.scheduler.executor.ranks.expert_loads import read_loads
    from tercet.scheduler.executor.worker_options import WorkerOptions

    ranks = experts.attention_ranks(options.tensor_parallel_size)
    return WorkerOptions(
        model=found.path,
        weights=found.weights,
        dtype=options.dtype,
        device=options.device,
        load_format="dummy" if options.load_format == "dummy" and found.weights is None else "safetensors",
        slots=schedule.slots(gpu=gpu, ranks=ranks),
        context_length=options.context_length,
        page_size=options.page_size,
        step_tokens=schedule.step_tokens(gpu=gpu, ranks=ranks),
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_bytes=options.kv_cache_bytes,
        mem_fraction_static=schedule.mem_fraction_static,
        max_total_tokens=schedule.max_total_tokens,
        attention_backend=options.attention_backend,
        quantization=options.quantization,
        threads=options.threads,
        overlap=schedule.steps_ahead(gpu=gpu, stages=options.pipeline_parallel_size) > 0,
        grammar_backend=options.grammar_backend,
        logprobs_mode=schedule.logprobs_mode,
        max_loras=schedule.max_loras,
        max_lora_rank=schedule.max_lora_rank,
        draft_rows=schedule.draft_rows(stages=options.pipeline_parallel_size),
        expert_parallel_size=experts.groups(options.tensor_parallel_size),
        expert_loads=() if experts.init_expert_location is None else read_loads(experts.init_expert_location),
        redundant_experts=experts.ep_num_redundant_experts,
        attention_ranks=ranks,
        language_only=options.language_only,
    )


def report_memory(
    options: ModelOptions, schedule: ScheduleOptions, experts: ExpertOptions, hosts: int, memory: int | None
) -> tuple[list[str], bool]:
    """Return lines about the memory of each rank, and whether the model fits. Raise ConfigError or ModelError."""
    experts.check(options.tensor_parallel_size, options.pipeline_parallel_size)
    if options.encoder_only:
        raise ConfigError("--encoder-only: the memory of a tower cannot be computed from config.json, leave it out")
    from tercet.scheduler.executor.dry_run import available_memory, report
    from tercet.scheduler.models.layers.shard import Split

    path = config_directory(options.model)
    gpu = options.device != "cpu"
    found = ResolvedModel(path, served_name(options.model, path), Task.GENERATE)
    worker = replace(_worker_options(options, schedule, experts, found, gpu=gpu), device="cuda" if gpu else "cpu")
    split = Split(options.tensor_parallel_size, options.pipeline_parallel_size)
    memory = memory or available_memory(options.device, split.ranks // hosts)
    return report(worker, split, hosts, memory, found.name)


def update_groups_of(options: ModelOptions, peer: str) -> UpdateGroups:
    """Return the process groups in which a scheduler can get weights."""
    if options.executor == "fake":
        return NoUpdateGroups("the fake executor joins no process group")
    if options.split_flags:
        why = f"{options.split_flags}: no trainer can broadcast to several ranks"
        return NoUpdateGroups(f"{why}, use /update_weights_from_tensor")
    from tercet.scheduler.device.devices import select_device
    from tercet.scheduler.weight_transfer.update_groups import TorchUpdateGroups

    return TorchUpdateGroups(peer, select_device(options.device))


def build_fake(
    options: ModelOptions,
    schedule: ScheduleOptions,
    found: ResolvedModel,
    report: ReportBytes,  # noqa: ARG001
    advance: Advance,  # noqa: ARG001
    network: HostNetwork | None = None,
    experts: ExpertOptions = ExpertOptions(),  # noqa: ARG001
) -> Executor:
    """Return an executor that computes nothing but has the vocabulary of a real model. It needs no torch."""
    from tercet.scheduler.testing.fake_executor import FakeExecutor

    if network is not None:
        raise ConfigError(f"--nnodes {network.hosts}: the fake executor has nothing to share")
    config = read_json(found.path / "config.json")
    length, vocab_size = (config.get(name) for name in ("max_position_embeddings", "vocab_size"))
    if not isinstance(length, int) or not isinstance(vocab_size, int):
        raise ModelError(f"{found.path}/config.json lacks max_position_embeddings or vocab_size")
    length = options.context_length or length
    slots = schedule.slots(gpu=False)
    pages = slots * -(-length // options.page_size)
    capacity = Capacity(
        page_size=options.page_size,
        groups=[CacheGroup("full", pages)],
        slots=slots,
        context_length=length,
        vocab_size=vocab_size,
        eos_token_ids=[],
        adapters=schedule.max_loras,
    )
    return FakeExecutor(capacity, verify=False, weights=str(found.weights or ""))


EXECUTORS: dict[
    str,
    Callable[
        [ModelOptions, ScheduleOptions, ResolvedModel, ReportBytes, Advance, HostNetwork | None, ExpertOptions],
        Executor,
    ],
] = {
    "torch": build_torch,
    "fake": build_fake,
}
