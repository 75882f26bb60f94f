"""Documentation of SGLang's routes: generation, sessions, tokens, control and adapters."""

from collections.abc import Mapping

from pydantic import BaseModel

from tercet.frontend.api.docs.examples import RID
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.sglang.adapter_routes import LOAD_PATHS, UNLOAD_PATHS, LoadAdapter, UnloadAdapter
from tercet.frontend.api.sglang.control_routes import (
    AbortRequest,
    CheckWeights,
    ContinueGeneration,
    PauseGeneration,
    UpdateWeights,
    UpdateWeightVersion,
)
from tercet.frontend.api.sglang.encode import NativeClassify, NativeEncode
from tercet.frontend.api.sglang.generate import DETOKENIZE_PATHS, TOKENIZE_PATHS
from tercet.frontend.api.sglang.generate_schema import Detokenize, NativeGenerate, Tokenize
from tercet.frontend.api.sglang.parse_routes import ParseFunctionCall, SeparateReasoning
from tercet.frontend.api.sglang.session_schema import CloseSession, OpenSession


def control(
    summary: str,
    answer: str,
    response: object,
    body: type[BaseModel] | None = None,
    example: Mapping[str, object] | None = None,
) -> Operation:
    """Return an operation that needs an admin key."""
    return Operation(
        tag="Control",
        summary=f"{summary} Needs an admin key.",
        answer=answer,
        body=body,
        example=example or {},
        admin=True,
        response=response,
    )


OBEYED = {"success": True, "schedulers": {"scheduler-0": "done"}}
_LOAD = control(
    summary="Load a LoRA adapter under a name that requests can use.",
    answer="The paths of all adapters, by name.",
    body=LoadAdapter,
    example={"lora_name": "haiku", "lora_path": "/adapters/haiku"},
    response={"success": True, "loaded_adapters": {"haiku": "/adapters/haiku"}},
)
_UNLOAD = control(
    summary="Unload a LoRA adapter.",
    answer="The paths of the remaining adapters, by name.",
    body=UnloadAdapter,
    example={"lora_name": "haiku"},
    response={"success": True, "loaded_adapters": {}},
)

_FLUSH = control(
    summary="Remove the cached prefixes that no running request uses.",
    answer="The reply of each scheduler.",
    response=OBEYED,
)
_FREEZE = control(
    summary="Exclude the present objects of a frontend from garbage collections.",
    answer="A confirmation.",
    response={"success": True},
)
_VECTOR = {"embedding": [0.5, -0.5], "meta_info": {"id": RID, "prompt_tokens": 5}}
_TOKENIZE = Operation(
    tag="Native",
    summary="Tokenize a text, or a chat rendered by the model's template.",
    answer="The token ids and their number.",
    body=Tokenize,
    example={"prompt": "A tercet is"},
    response={"tokens": [5, 6, 7], "count": 3, "max_model_len": 2048},
)
_DETOKENIZE = Operation(
    tag="Native",
    summary="Turn token ids into text.",
    answer="The text.",
    body=Detokenize,
    example={"tokens": [5, 6, 7]},
    response={"prompt": "A tercet is", "text": "A tercet is"},
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
                "weight_version": "0123456789abcdef",
                "e2e_latency": 0.0625,
            },
        },
    ),
    ("POST", "/encode"): Operation(
        tag="Scores",
        summary="Create the vector of each input. SGLang's format.",
        answer="The vector and its meta_info; a list for a list of inputs.",
        lists=True,
        body=NativeEncode,
        example={"text": "Three lines."},
        response=_VECTOR,
    ),
    ("POST", "/classify"): Operation(
        tag="Scores",
        summary="Compute the scores of each input. SGLang's format, or with `input` vLLM's.",
        answer="The scores and their meta_info; a list for a list of inputs.",
        lists=True,
        body=NativeClassify,
        example={"text": "Three lines."},
        response=_VECTOR,
    ),
    ("POST", "/parse_function_call"): Operation(
        tag="Native",
        summary="Parse the tool calls in a text. SGLang's format.",
        answer="The calls, and the text around them.",
        body=ParseFunctionCall,
        example={
            "text": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            "tools": [{"type": "function", "function": {"name": "weather"}}],
            "tool_call_parser": "qwen25",
        },
        response={
            "normal_text": "",
            "calls": [{"tool_index": 0, "name": "weather", "parameters": '{"city": "Rome"}'}],
        },
    ),
    ("POST", "/separate_reasoning"): Operation(
        tag="Native",
        summary="Separate the reasoning in a text from the rest. SGLang's format.",
        answer="The reasoning and the rest.",
        body=SeparateReasoning,
        example={"text": "<think>Rhyme it.</think>Three lines.", "reasoning_parser": "deepseek-r1"},
        response={"reasoning_text": "Rhyme it.", "text": "Three lines."},
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
    **{("POST", path): _TOKENIZE for path in TOKENIZE_PATHS},
    **{("POST", path): _DETOKENIZE for path in DETOKENIZE_PATHS},
    ("POST", "/abort_request"): Operation(
        tag="Control",
        summary="Abort a request by its id, at any frontend; with an admin key, abort all requests.",
        answer="A confirmation.",
        body=AbortRequest,
        example={"rid": "frontend-0-0123456789abcdefghijklmn"},
        admin=True,
        response={"success": True},
    ),
    **{(method, "/flush_cache"): _FLUSH for method in ("GET", "POST")},
    **{(method, "/freeze_gc"): _FREEZE for method in ("GET", "POST")},
    ("POST", "/pause_generation"): control(
        summary="Pause generation; requests are kept unless the mode is `abort`.",
        answer="The reply of each scheduler.",
        body=PauseGeneration,
        example={"mode": "in_place"},
        response=OBEYED,
    ),
    ("POST", "/continue_generation"): control(
        summary="Resume generation after a pause.",
        answer="The reply of each scheduler.",
        body=ContinueGeneration,
        example={"torch_empty_cache": True},
        response=OBEYED,
    ),
    ("POST", "/update_weights_from_disk"): control(
        summary="Load new weights of a model after running requests have finished.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeights,
        example={"model_path": "/checkpoints/step-700"},
        response={
            "success": True,
            "message": "The weights are those of /checkpoints/step-700.",
            "weights": {"scheduler-0": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
        },
    ),
    ("POST", "/weights_checker"): control(
        summary="Get the fingerprint of each scheduler's weights.",
        answer="The fingerprints.",
        body=CheckWeights,
        example={"action": "checksum"},
        response={"success": True, "message": "", "weights": {"scheduler-0": "9f86d081884c7d659a2feaa0c55ad015"}},
    ),
    ("POST", "/update_weight_version"): control(
        summary="Give the present weights a name, which is their version.",
        answer="The name.",
        body=UpdateWeightVersion,
        example={"new_version": "step-700", "abort_all_requests": False},
        response={"success": True, "message": "The weights have the version step-700.", "new_version": "step-700"},
    ),
    **{("POST", path): _LOAD for path in LOAD_PATHS},
    **{("POST", path): _UNLOAD for path in UNLOAD_PATHS},
}
