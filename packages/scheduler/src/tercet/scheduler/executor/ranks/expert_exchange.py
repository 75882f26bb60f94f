"""The exchange of experts' tokens among the ranks of a model: all-to-all of NCCL on GPUs, of Gloo on CPUs."""

import logging

import torch

from tercet.scheduler.executor.ranks.collectives import ProgressCollectives, TorchCollectives
from tercet.scheduler.executor.ranks.expert_loads import placements_of
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.expert_parallel.tokens import with_attention_ranks, with_experts
from tercet.scheduler.models.layers.shard import Shard

logger = logging.getLogger(__name__)


def with_exchange(shard: Shard, options: WorkerOptions, rendezvous: Rendezvous, device: torch.device) -> Shard:
    """Return a shard whose ranks form groups, each with some experts, or have attention of their own, as options say.

    Ranks that sum through shared memory meet again at the rendezvous, for an exchange by sockets: return once all have.
    """
    size = options.expert_parallel_size
    if size == 1:
        return shard
    if device.type == "cuda" and not shard.rank:
        logger.warning("expert parallelism: steps run without CUDA graphs, because ranks agree on numbers of tokens")
    collectives = shard.collectives
    plain = collectives.plain if isinstance(collectives, ProgressCollectives) else collectives
    if not isinstance(plain, TorchCollectives):
        stage = rendezvous.of_stage(shard.stage.number, shard.stage.count)
        plain = TorchCollectives(shard.rank, shard.size, stage, device)
    if options.attention_ranks > 1:
        return with_attention_ranks(shard, plain.all_to_all, placements_of(options))
    return with_experts(shard, size, plain.all_to_all, placements_of(options))
