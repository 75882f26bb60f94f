"""Weights that a trainer broadcasts, from a process that forms the group as trainers for SGLang do."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load

from tercet.protocol.messages.weight_transfers import InitWeightsUpdateGroupReq, UpdateWeightsFromDistributedReq
from tercet.scheduler.weight_transfer.update_groups import TorchUpdateGroups

SENT = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(0, 2)}
TRAINER = """
import datetime, torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
prefixed = dist.PrefixStore("trainer", store)
seconds = datetime.timedelta(seconds=60)
gloo = dist.Backend("gloo")
group, _ = c10d._new_process_group_helper(2, 0, [], gloo, prefixed, group_name="trainer", timeout=seconds)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
input()
sent = [torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16), torch.zeros(0, 2)]
for tensor in sent:
    dist.broadcast(tensor, src=0, group=group)
input()
"""


@pytest.fixture
def trainer() -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def request(**changes: object) -> UpdateWeightsFromDistributedReq:
    fields = {
        "names": [*SENT],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in SENT.values()],
        "shapes": [[*tensor.shape] for tensor in SENT.values()],
    }
    return UpdateWeightsFromDistributedReq(id="", part=0, last=True, **{"group": "trainer", **fields, **changes})  # type: ignore[arg-type]


def test_a_trainer_broadcasts_tensors(trainer: "subprocess.Popen[str]") -> None:
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    groups = TorchUpdateGroups("scheduler-0", torch.device("cpu"))
    join = InitWeightsUpdateGroupReq(
        id="",
        group="trainer",
        address="127.0.0.1",
        port=int(trainer.stdout.readline()),
        world_size=2,
        ranks={"scheduler-0": 1},
        backend="gloo",
    )
    groups.join(join)
    with pytest.raises(ValueError, match="group 'trainer' exists"):
        groups.join(join)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(groups.receive, request())
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        found = load(received.result())
    assert found.keys() == SENT.keys()
    assert all(found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in SENT.items())
    trainer.kill()
    trainer.wait()
    with pytest.raises(ValueError, match="the broadcast in group 'trainer' failed"):
        groups.receive(request())
    groups.leave("trainer")
    with pytest.raises(ValueError, match="there is no group 'trainer'"):
        groups.receive(request())


def test_a_group_that_cannot_work_is_refused() -> None:
    groups = TorchUpdateGroups("scheduler-0", torch.device("cpu"))
    fields = {"id": "", "group": "g", "address": "127.0.0.1", "port": 1, "world_size": 2, "ranks": {"scheduler-0": 1}}
    with pytest.raises(ValueError, match="nccl needs a GPU"):
        groups.join(InitWeightsUpdateGroupReq(**fields, backend="nccl"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no group 'g'"):
        groups.leave("g")
