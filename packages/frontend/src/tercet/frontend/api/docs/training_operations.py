"""Documentation of SGLang's routes for training loops and profiles."""

import msgspec

from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.docs.sglang_operations import OBEYED, control
from tercet.frontend.api.sglang.profile_routes import StartProfile
from tercet.frontend.api.sglang.training_schema import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    MemoryOccupation,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
)

_RELEASE = control(
    summary="Give memory of the schedulers back to the system; requests are kept until it is resumed.",
    answer="The reply of each scheduler.",
    body=MemoryOccupation,
    example={"tags": ["kv_cache", "weights"]},
    response=OBEYED,
)
_RESUME = control(
    summary="Allocate released memory again, and load the weights again.",
    answer="The reply of each scheduler.",
    body=MemoryOccupation,
    example={"tags": ["weights"]},
    response=OBEYED,
)
_UPDATED = {
    "success": True,
    "message": "The weights are updated.",
    "weights": {"scheduler-0": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
}
_GET_WEIGHTS = control(
    summary="Get the first rows of a tensor of the served weights.",
    answer="The values, as nested lists.",
    body=GetWeightsByName,
    example={"name": "model.norm.weight", "truncate_size": 2},
    response=[1.0, 1.0],
)

_START_PROFILE = control(
    summary="Record the next steps of all schedulers for Perfetto.",
    answer="The file that each scheduler will write.",
    body=StartProfile,
    example={"num_steps": 30, "with_stack": True},
    response={"success": True, "schedulers": {"scheduler-0": "/state/profiles/scheduler-0.trace.json.gz"}},
)
_STOP_PROFILE = control(
    summary="End the profiles of all schedulers, which then write their files.",
    answer="The file of each scheduler.",
    response={"success": True, "schedulers": {"scheduler-0": "/state/profiles/scheduler-0.trace.json.gz"}},
)


def _both(path: str, operation: Operation) -> dict[MethodAndPath, Operation]:
    """Return the operations of a route for both methods. Only POST has a body."""
    plain = msgspec.structs.replace(operation, body=None, example={})
    return {("GET", path): plain, ("POST", path): operation}


TRAINING: dict[MethodAndPath, Operation] = {
    **_both("/release_memory_occupation", _RELEASE),
    **_both("/resume_memory_occupation", _RESUME),
    **{(method, "/get_weights_by_name"): _GET_WEIGHTS for method in ("GET", "POST")},
    **_both("/start_profile", _START_PROFILE),
    **_both("/stop_profile", _STOP_PROFILE),
    ("POST", "/update_weights_from_tensor"): control(
        summary="Replace tensors of the served weights by those in the body.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeightsFromTensor,
        example={"serialized_named_tensors": ["SAAAAAAAAAB7Im1vZGVs"], "weight_version": "step-700"},
        response=_UPDATED,
    ),
    ("POST", "/update_weights_from_distributed"): control(
        summary="Replace tensors of the served weights by those that a trainer broadcasts.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeightsFromDistributed,
        example={"names": ["lm_head.weight"], "dtypes": ["bfloat16"], "shapes": [[32000, 2048]]},
        response=_UPDATED,
    ),
    ("POST", "/init_weights_update_group"): control(
        summary="Let the schedulers of a model join a trainer's process group.",
        answer="A confirmation, once all members have joined.",
        body=InitWeightsUpdateGroup,
        example={
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        },
        response={"success": True, "message": "Every scheduler has joined weight_update_group."},
    ),
    ("POST", "/destroy_weights_update_group"): control(
        summary="Let the schedulers of a model leave a process group.",
        answer="A confirmation.",
        body=DestroyWeightsUpdateGroup,
        example={"group_name": "weight_update_group"},
        response={"success": True, "message": "Every scheduler has left weight_update_group."},
    ),
}
