"""The exchange of experts' tokens among the ranks of a model: all-to-all of NCCL on GPUs, of Gloo on CPUs."""

import logging

import torch

from tercet.scheduler.executor.ranks.collectives import ProgressCollectives, TorchCollectives
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous
from tercet.scheduler.models.layers.expert_parallel.tokens import with_experts
from tercet.scheduler.models.layers.shard import Shard

logger = logging.getLogger(__name__)


def with_exchange(shard: Shard, experts: int, rendezvous: Rendezvous, device: torch.device) -> Shard:
    """Return a shard whose ranks form `experts` groups, each with some experts.

    Ranks that sum through shared memory meet again at the rendezvous, for an exchange by sockets: return once all have.
    """
    if experts == 1:
        return shard
    if device.type == "cuda" and not shard.rank:
        logger.warning("expert parallelism: steps run without CUDA graphs, because ranks agree on numbers of tokens")
    collectives = shard.collectives
    plain = collectives.plain if isinstance(collectives, ProgressCollectives) else collectives
    if not isinstance(plain, TorchCollectives):
        stage = rendezvous.of_stage(shard.stage.number, shard.stage.count)
        plain = TorchCollectives(shard.rank, shard.size, stage, device)
    return with_experts(shard, experts, plain.all_to_all)
