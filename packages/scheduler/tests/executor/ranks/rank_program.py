"""Rank 0 of two, as a program: `rank_program.py stepping|waiting|meeting|refused MODEL`.

It says which process its follower is, and then what it does: steps without end, one that it leaves to the follower
alone, or nothing, while the follower waits to meet it. The follower of one that is refused has an option that is wrong.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.ranks import worker_group as followers_module
from tercet.scheduler.executor.ranks.collectives import collectives_of
from tercet.scheduler.executor.ranks.rank_messages import RankStep, encode_order
from tercet.scheduler.executor.ranks.ranks import Ranks
from tercet.scheduler.executor.ranks.worker_group import WorkerGroup
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.shard import Split

NOWHERE: Sequence[Sequence[int]] = [[], []]


def main(mode: str, model: str) -> None:
    logging.basicConfig(level="INFO")
    options = WorkerOptions(model=Path(model), load_format="dummy", device="cpu", slots=2, kv_cache_bytes=1 << 20)
    if mode in {"meeting", "refused"}:
        wrong = replace(options, attention_backend="none") if mode == "refused" else options
        followers_module._CONFIG_GRACE = 0.1
        followers = WorkerGroup([options, wrong], NOWHERE)
        say("rank 1 is", *followers.pids)
        if mode == "refused":
            collectives_of(0, 2, followers.rendezvous, torch.device("cpu"))
        time.sleep(60)
    ranks = Ranks(options, Split(2))
    say("rank 1 is", *ranks.pids)
    try:
        run(ranks, mode)
    finally:
        ranks.close()


def run(ranks: Ranks, mode: str) -> None:
    init = SlotInit(
        slot=0, tokens=pack_ints([1, 2]), prompt_tokens=1, choice=0, sampling=SamplingParams(max_new_tokens=1)
    )
    first = Plan(step=0, introduce=[init], pages=[PageUpdate(0, 0, [[1]])], rows=[Row(0, 0, 2, sample=True)])
    ranks.submit(first).result()
    again = Plan(step=1, rows=[Row(0, 0, 2, sample=True)])
    if mode == "waiting":
        ranks._workers.send(encode_order(RankStep(plan=again)))
        say("the step is left")
        time.sleep(60)
    for step in count(1):
        ranks.submit(again).result()
        if step % 50 == 0:
            say("steps", step)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
