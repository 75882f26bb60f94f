"""Requests of training loops: memory, and weights in messages."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tercet.frontend.api.openai.sampling_schema import UNSUPPORTED, Name, Strict
from tercet.frontend.errors import BadRequestError
from tercet.protocol.messages.values import MemoryTag

_GroupName = Annotated[str, Field(min_length=1, max_length=256)]
_DEFAULT_GROUP = "weight_update_group"
_MOST_TENSORS = 65_536

Dtype = Annotated[
    Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int32", "int64"],
    BeforeValidator(lambda value: value.removeprefix("torch.") if isinstance(value, str) else value),
]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=8)]


class MemoryOccupation(Strict):
    """Memory to release or to resume. CUDA graphs are released and resumed with the rest."""

    tags: Annotated[list[Literal["weights", "kv_cache", "cuda_graph"]], Field(max_length=16)] | None = None

    @property
    def memory(self) -> list[MemoryTag]:
        return [tag for tag in MemoryTag if not self.tags or tag in self.tags]


class WeightPart(Strict):
    """Fields of a part of new weights. `flush_cache` false says that other parts follow."""

    model: Name | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: Name | None = None
    disable_draft_model: bool | None = None

    @property
    def last(self) -> bool:
        return self.flush_cache is not False


class UpdateWeightsFromTensor(WeightPart):
    """Tensors that replace those of the served weights: safetensors files in base64, never pickles."""

    serialized_named_tensors: Annotated[list[str], Field(max_length=512)]
    load_format: Literal["safetensors"] | None = None


class UpdateWeightsFromDistributed(WeightPart):
    """Tensors that rank 0 of a process group broadcasts in this order."""

    names: Annotated[list[Name], Field(max_length=_MOST_TENSORS)]
    dtypes: Annotated[list[Dtype], Field(max_length=_MOST_TENSORS)]
    shapes: Annotated[list[Shape], Field(max_length=_MOST_TENSORS)]
    group_name: _GroupName = _DEFAULT_GROUP
    load_format: Annotated[str, Field(max_length=64), UNSUPPORTED] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> "UpdateWeightsFromDistributed":
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise BadRequestError("'names', 'dtypes' and 'shapes' must have equal lengths.", param="names")
        return self


class InitWeightsUpdateGroup(Strict):
    """Process group of a trainer, which is rank 0, and the schedulers, which follow from `rank_offset`."""

    master_address: Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[\w.:-]+$")]
    master_port: Annotated[int, Field(ge=1, le=65_535)]
    rank_offset: Annotated[int, Field(ge=1, le=65_535)]
    world_size: Annotated[int, Field(ge=2, le=65_536)]
    group_name: _GroupName = _DEFAULT_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"
    model: Name | None = None


class DestroyWeightsUpdateGroup(Strict):
    """Process group to leave."""

    group_name: _GroupName = _DEFAULT_GROUP
    model: Name | None = None


class GetWeightsByName(Strict):
    """First rows of one tensor."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    truncate_size: Annotated[int, Field(ge=1, le=2**20)] = 100
    model: Name | None = None
