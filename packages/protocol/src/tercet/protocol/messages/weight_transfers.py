"""Weights that reach a scheduler in messages or by torch.distributed. Since 1.1; not every scheduler decodes these."""

from tercet.protocol.messages.messages import Message


class UpdateWeightsFromTensorReq(Message, frozen=True, kw_only=True):
    """Tensors that replace those of the served weights: one raw frame for each safetensors file.

    A ControlReply answers each part. That of the last part is sent as for UpdateWeightsFromDiskReq.
    """

    id: str
    part: int
    """Number of parts that were sent before. Part 0 drops those of an unfinished update; any other part is refused by
    a scheduler that does not have all before it."""
    last: bool
    """Load the tensors of all parts now."""


class InitWeightsUpdateGroupReq(Message, frozen=True, kw_only=True):
    """Joins a process group of torch.distributed, whose rank 0 is a trainer. The reply is sent when all have joined."""

    id: str
    group: str
    address: str
    port: int
    world_size: int
    ranks: dict[str, int]
    """Rank of each scheduler, by its peer id."""
    backend: str


class DestroyWeightsUpdateGroupReq(Message, frozen=True, kw_only=True):
    """Leaves a process group."""

    id: str
    group: str


class UpdateWeightsFromDistributedReq(Message, frozen=True, kw_only=True):
    """Tensors as in UpdateWeightsFromTensorReq, which rank 0 of a process group broadcasts one by one."""

    id: str
    part: int
    last: bool
    group: str
    names: list[str]
    dtypes: list[str]
    """Names of torch dtypes, such as "bfloat16"."""
    shapes: list[list[int]]


class GetWeightsByNameReq(Message, frozen=True, kw_only=True):
    """Asks for the first rows of a tensor in the files of the served weights. The reply's message is their JSON."""

    id: str
    name: str
    rows: int


WeightTransferReq = (
    UpdateWeightsFromTensorReq
    | UpdateWeightsFromDistributedReq
    | InitWeightsUpdateGroupReq
    | DestroyWeightsUpdateGroupReq
    | GetWeightsByNameReq
)
