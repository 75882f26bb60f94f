"""Conversion between messages of SGLang's scheduler service and requests and output of the frontend."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tercet.frontend.api.sglang.generate import to_generate_requests
from tercet.frontend.api.sglang.generate_schema import NativeGenerate
from tercet.frontend.errors import BadRequestError, ContextLengthExceededError
from tercet.frontend.grpc.schema import message
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.http.request_body import validation_error
from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import FinishReason, Logprobs, unpack_floats, unpack_ints

_Response, _Chunk, _Complete = message("GenerateResponse"), message("GenerateStreamChunk"), message("GenerateComplete")
_Output, _Input = message("OutputLogProbs"), message("InputLogProbs")
_InputToken, _Top = message("InputTokenLogProb"), message("TopLogProbs")
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_CONTAINERS = ("stop", "stop_token_ids", "logit_bias")
_UNSUPPORTED = {
    "mm_inputs": "image_data",
    "disaggregated_params": "bootstrap_host",
    "custom_logit_processor": "custom_logit_processor",
    "token_ids_logprob": "token_ids_logprob",
    "return_hidden_states": "return_hidden_states",
    "input_embeds": "input_embeds",
}
"""Fields that are refused, by their names in /generate."""

_MOST_ENTRIES = 1024
"""Maximum entries of a sampling parameter that is a list or a map; the schema of /generate allows fewer."""


def native_request(asked: Any, context: int) -> NativeGenerate:
    """Return a GenerateRequest as a request of /generate. Raises BadRequestError.

    Long lists are refused before they are copied, which would delay every other request.
    """
    if not asked.HasField("tokenized"):
        raise BadRequestError("'tokenized' is missing.", param="tokenized")
    if (length := len(asked.tokenized.input_ids)) > context:
        raise ContextLengthExceededError(
            f"The prompt has {length} tokens, more than the model's context of {context}.", param="tokenized.input_ids"
        )
    given = {field.name: value for field, value in asked.ListFields()}
    body = {
        "input_ids": list(asked.tokenized.input_ids),
        "sampling_params": _sampling(asked.sampling_params),
        "stream": asked.stream,
        **{name: True for field, name in _UNSUPPORTED.items() if field in given},
    }
    if asked.lora_id:
        body["lora_path"] = asked.lora_id
    if asked.HasField("data_parallel_rank"):
        body["data_parallel_rank"] = asked.data_parallel_rank
    if asked.return_logprob:
        body |= {
            "return_logprob": True,
            "top_logprobs_num": asked.top_logprobs_num,
            "logprob_start_len": asked.logprob_start_len,
        }
    try:
        return NativeGenerate.model_validate(body)
    except ValidationError as error:
        raise validation_error(error, body, NativeGenerate) from None


def _sampling(params: Any) -> dict[str, Any]:
    """Return sampling parameters by their names in /generate. Flags and a temperature that are not set are zero."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    sampling |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    for field, value in params.ListFields():
        if field.name in _CONTAINERS and len(value) > _MOST_ENTRIES:
            text = f"'{field.name}' has {len(value)} entries, more than {_MOST_ENTRIES}."
            raise BadRequestError(text, param=f"sampling_params.{field.name}")
        if field.name in _FLOATS:
            sampling[field.name] = float(f"{value:.7g}")  # 0.7 arrives as 0.699999988
        elif field.name == "logit_bias":
            sampling["logit_bias"] = dict(value)
        elif field.name in ("stop", "stop_token_ids"):
            sampling[field.name] = list(value)
        elif field.name == "custom_params":
            sampling["custom_params"] = True
        else:
            sampling["ebnf" if field.name == "ebnf_grammar" else field.name] = value
    return sampling


def generate_request(body: NativeGenerate, model: ServedModel) -> Steps[list[GenerateRequest]]:
    """Return the only request, in a list. Raises BadRequestError."""
    adapters = {} if body.lora_path is None else {str(body.lora_path): model.lora}
    return to_generate_requests(body, model, adapters)


class ChoiceOutput:
    """Output of one choice as messages of the service."""

    def __init__(self, request_id: str, state: ReqState, index: int) -> None:
        self._request_id = request_id
        self._state = state
        self._index = index
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> None:
        """Add tokens to the whole output."""
        if self._state.request.options.max_tokens != 0:  # one token is computed even then
            self._ids += token_ids
            self._logprobs += logprobs

    def chunk(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> Any:
        """Return the chunk of a stream for new tokens, which are added."""
        first = not self._ids
        begin, parts = len(self._ids), len(self._logprobs)
        self.add(token_ids, logprobs)
        chunk = _Chunk(token_ids=self._ids[begin:], index=self._index, **self._usage())
        chunk = self._with_logprobs(chunk, self._ids[begin:], self._logprobs[parts:], prompt=first)
        return _Response(request_id=self._request_id, chunk=chunk)

    def complete(self, finish: FinishReason) -> Any:
        """Return the end of a choice, with its whole output."""
        matched: Mapping[str, int | str] = {}
        if isinstance(finish.matched, int):
            matched = {"matched_token_id": finish.matched}
        elif isinstance(finish.matched, str):
            matched = {"matched_stop_str": finish.matched}
        complete = _Complete(
            output_ids=self._ids, finish_reason=finish.type.value, index=self._index, **self._usage(), **matched
        )
        complete = self._with_logprobs(complete, self._ids, self._logprobs, prompt=True)
        return _Response(request_id=self._request_id, complete=complete)

    def _usage(self) -> dict[str, int]:
        state = self._state
        return {
            "prompt_tokens": state.prompt_tokens,
            "completion_tokens": len(self._ids),
            "cached_tokens": state.cached_tokens,
        }

    def _with_logprobs(self, output: Any, ids: Sequence[int], logprobs: Sequence[Logprobs], *, prompt: bool) -> Any:
        options = self._state.request.options
        if options.logprobs is None:
            return output
        chosen, top = _scores(logprobs)
        output.output_logprobs.CopyFrom(_Output(token_logprobs=chosen, token_ids=ids, top_logprobs=top))
        if prompt and (scores := self._state.prompt_logprobs) is not None:
            chosen, top = _scores([scores])
            start = options.logprob_start
            output.input_logprobs.CopyFrom(
                _Input(
                    token_logprobs=[_InputToken() if math.isnan(each) else _InputToken(value=each) for each in chosen][
                        start:
                    ],
                    token_ids=unpack_ints(self._state.prompt_ids)[start:],
                    top_logprobs=top[start:],
                )
            )
        return output


def _scores(parts: Sequence[Logprobs]) -> tuple[list[float], list[Any]]:
    """Return the log-probabilities of tokens, and those of their alternatives."""
    chosen: list[float] = []
    top: list[Any] = []
    for part in parts:
        chosen += unpack_floats(part.chosen)
        if part.top:
            ids, values = unpack_ints(part.top_ids), unpack_floats(part.top_logprobs)
            for begin in range(0, len(ids), part.top):
                end = begin + part.top
                top.append(_Top(values=values[begin:end], token_ids=ids[begin:end]))
    return chosen, top
