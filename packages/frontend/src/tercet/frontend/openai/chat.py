"""/v1/chat/completions."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.answer import Whole, answer
from tercet.frontend.body import read_model
from tercet.frontend.errors import UnknownParameterError, UnsupportedParameterError
from tercet.frontend.event_stream import DONE, event
from tercet.frontend.generate_request import ChatPrompt, GenerateRequest
from tercet.frontend.generation import Arrival, Generation
from tercet.frontend.openai.chat_schema import ChatRequest, Message
from tercet.frontend.openai.logprobs import chat_logprobs, without_end
from tercet.frontend.openai.usage import usage
from tercet.frontend.req_state import Update
from tercet.frontend.served_model import ServedModel
from tercet.frontend.tokenizer_manager import TokenizerManager
from tercet.protocol.values import FinishReason, LogprobParams

_TEMPLATE_KWARGS = {"enable_thinking", "thinking", "reasoning_effort"}


class OpenAIServingChat:
    """Chat completions of every served model."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    async def create(self, request: Request) -> Response:
        """The route."""
        body = await read_model(request, ChatRequest, self._body_limit)
        model = self._manager.models.get(body.model)
        form = ChatForm(body, model)
        return await answer(request, self._manager, [to_generate(body, model)], form, stream=bool(body.stream))


def to_generate(body: ChatRequest, model: ServedModel) -> GenerateRequest:
    """The request as the rest of the frontend knows it. Raises BadRequestError."""
    max_tokens, max_tokens_param = body.output_limit
    continues = bool(body.continue_final_message)
    asked = body.add_generation_prompt
    return GenerateRequest(
        model=body.model,
        prompt=ChatPrompt(
            messages=[message_of(message) for message in body.messages],
            add_generation_prompt=not continues if asked is None else asked,
            continue_final_message=continues,
            kwargs=_template_kwargs(body, model),
        ),
        sampling=body.sampling(model.files.defaults),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        seed=body.seed,
        stop=body.stops(),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        logprobs=LogprobParams(top=body.top_logprobs or 0) if body.logprobs else None,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def message_of(message: Message) -> dict[str, Any]:
    """A message as templates read it; a refusal is what the assistant said."""
    shaped = message.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
    if "content" not in shaped:
        shaped["content"] = getattr(message, "refusal", None) or ""
    return shaped


def _template_kwargs(body: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """Variables for the template, among those allowed, and only such as it reads."""
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs.keys() - _TEMPLATE_KWARGS:
        raise UnknownParameterError(
            f"Unknown parameter: 'chat_template_kwargs.{name}'.", param=f"chat_template_kwargs.{name}"
        )
    if body.reasoning_effort is None:
        return kwargs
    variables = model.files.template.variables if model.files.template else frozenset()
    if "reasoning_effort" in variables:
        return {"reasoning_effort": body.reasoning_effort, **kwargs}
    if "enable_thinking" in variables:
        return {"enable_thinking": body.reasoning_effort != "none", **kwargs}
    if body.reasoning_effort != "none":
        raise UnsupportedParameterError("This model has no reasoning to set the effort of.", param="reasoning_effort")
    return kwargs


class ChatForm:
    """Writes chunks and completions. A chunk is a prefix, made once, and what is new."""

    def __init__(self, body: ChatRequest, model: ServedModel) -> None:
        self._names = model.files.token_bytes
        self._logprobs = bool(body.logprobs)
        self._shows_end = bool(body.include_stop_str_in_output)
        self._include_usage = body.include_usage
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": model.fingerprint,
        }
        head = orjson.dumps({**self._head, "object": "chat.completion.chunk"})
        self._prefix = b"data: " + head[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if body.include_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def events(self, generation: Generation, arrivals: list[Arrival]) -> bytes:  # noqa: ARG002
        """One chunk for each choice with news, after one with its role where it is the first."""
        return b"".join(self._events_of(arrival.update) for arrival in arrivals)

    def _events_of(self, update: Update) -> bytes:
        chunks = b""
        if update.index not in self._begun:
            self._begun.add(update.index)
            delta = b'{"role":"assistant","content":"","refusal":null}'
            chunks = self._chunk(update.index, delta, b"null", None)
        if not (update.text or update.finish or self._logprobs):
            return chunks
        delta = b'{"content":' + orjson.dumps(update.text) + b"}" if update.text or self._logprobs else b"{}"
        logprobs = b"null"
        if self._logprobs and (ids := self._shown(update.token_ids, update.finish)):
            logprobs = orjson.dumps(chat_logprobs(self._names, ids, update.logprobs))
        return chunks + self._chunk(update.index, delta, logprobs, update.finish)

    def _shown(self, token_ids: Sequence[int], finish: FinishReason | None) -> Sequence[int]:
        return token_ids if self._shows_end else without_end(token_ids, finish)

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish: FinishReason | None) -> bytes:
        reason = b"null" if finish is None else b'"' + finish.type.encode() + b'"'
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._prefix,
            index,
            delta,
            logprobs,
            reason,
            self._suffix,
        )

    def end(self, generation: Generation) -> bytes:
        """The chunk of token counts, when asked for, and the end of the stream."""
        if not self._include_usage:
            return DONE
        counts = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(generation)}
        return event(orjson.dumps(counts)) + DONE

    def whole(self, generation: Generation, choices: list[Whole]) -> bytes:
        """A chat.completion."""
        return orjson.dumps(
            {
                **self._head,
                "object": "chat.completion",
                "choices": [self._choice(choice) for choice in choices],
                "usage": usage(generation),
            }
        )

    def _choice(self, choice: Whole) -> dict[str, Any]:
        ids = self._shown(choice.token_ids, choice.finish)
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(self._names, ids, choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish.type if choice.finish else None,
        }
