"""Documentation of SGLang's routes: generation, sessions, tokens, control and adapters."""

from tercet.frontend.api.docs.examples import RID
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.sglang.adapter_routes import LOAD_PATHS, UNLOAD_PATHS, LoadAdapter, UnloadAdapter
from tercet.frontend.api.sglang.control_routes import AbortRequest, UpdateWeights
from tercet.frontend.api.sglang.generate_schema import Detokenize, NativeGenerate, Tokenize
from tercet.frontend.api.sglang.session_schema import CloseSession, OpenSession

_OBEYED = {"success": True, "schedulers": {"scheduler-0": "done"}}
_LOAD = Operation(
    tag="Control",
    summary="Load a LoRA adapter under a name that requests can use. Needs an admin key.",
    answer="The paths of all adapters, by name.",
    body=LoadAdapter,
    example={"lora_name": "haiku", "lora_path": "/adapters/haiku"},
    admin=True,
    response={"success": True, "loaded_adapters": {"haiku": "/adapters/haiku"}},
)
_UNLOAD = Operation(
    tag="Control",
    summary="Unload a LoRA adapter. Needs an admin key.",
    answer="The paths of the remaining adapters, by name.",
    body=UnloadAdapter,
    example={"lora_name": "haiku"},
    admin=True,
    response={"success": True, "loaded_adapters": {}},
)

SGLANG: dict[MethodAndPath, Operation] = {
    ("POST", "/generate"): Operation(
        tag="Native",
        summary="Generate from a text or token ids. SGLang's format.",
        answer="The text and its meta_info; a list for a list of prompts or n above 1.",
        lists=True,
        body=NativeGenerate,
        example={"text": "A tercet is", "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}},
        streams=True,
        response={
            "index": 0,
            "text": " three lines.",
            "output_ids": [5, 6, 7],
            "meta_info": {
                "id": RID,
                "finish_reason": {"type": "stop", "matched": 0},
                "prompt_tokens": 14,
                "completion_tokens": 3,
                "cached_tokens": 8,
            },
        },
    ),
    ("POST", "/open_session"): Operation(
        tag="Native",
        summary="Open a session, whose turns later prompts can continue with `session_params`.",
        answer="The session's id.",
        body=OpenSession,
        example={"capacity_of_str_len": 1024},
        response="0123456789abcdef0123456789abcdef",
    ),
    ("POST", "/close_session"): Operation(
        tag="Native",
        summary="Close a session.",
        answer="null",
        body=CloseSession,
        example={"session_id": "0123456789abcdef0123456789abcdef"},
        response=None,
    ),
    ("POST", "/tokenize"): Operation(
        tag="Native",
        summary="Tokenize a text, or a chat rendered by the model's template.",
        answer="The token ids and their number.",
        body=Tokenize,
        example={"prompt": "A tercet is"},
        response={"tokens": [5, 6, 7], "count": 3, "max_model_len": 2048},
    ),
    ("POST", "/detokenize"): Operation(
        tag="Native",
        summary="Turn token ids into text.",
        answer="The text.",
        body=Detokenize,
        example={"tokens": [5, 6, 7]},
        response={"prompt": "A tercet is", "text": "A tercet is"},
    ),
    ("POST", "/abort_request"): Operation(
        tag="Control",
        summary="Abort a request by its id, at any frontend; with an admin key, abort all requests.",
        answer="A confirmation.",
        body=AbortRequest,
        example={"rid": "frontend-0-0123456789abcdefghijklmn"},
        admin=True,
        response={"success": True},
    ),
    ("POST", "/flush_cache"): Operation(
        tag="Control",
        summary="Remove the cached prefixes that no running request uses. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
        response=_OBEYED,
    ),
    ("POST", "/pause_generation"): Operation(
        tag="Control",
        summary="Pause generation; requests are kept. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
        response=_OBEYED,
    ),
    ("POST", "/continue_generation"): Operation(
        tag="Control",
        summary="Resume generation after a pause. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
        response=_OBEYED,
    ),
    ("POST", "/update_weights_from_disk"): Operation(
        tag="Control",
        summary="Load new weights of a model after running requests have finished. Needs an admin key.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeights,
        example={"model_path": "/checkpoints/step-700"},
        admin=True,
        response={
            "success": True,
            "message": "The weights are those of /checkpoints/step-700.",
            "weights": {"scheduler-0": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
        },
    ),
    **{("POST", path): _LOAD for path in LOAD_PATHS},
    **{("POST", path): _UNLOAD for path in UNLOAD_PATHS},
}
