"""SGLang's /generate, /tokenize and /detokenize endpoints."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.generation_response import respond
from tercet.frontend.api.openai.chat_messages import message_of
from tercet.frontend.api.openai.sampling_schema import biases, sampling_values, stop_strings
from tercet.frontend.api.openai.structured_schema import native_constraint_of
from tercet.frontend.api.sglang.client_ids import ClientIds
from tercet.frontend.api.sglang.generate_schema import (
    Detokenize,
    NativeGenerate,
    PromptOptions,
    Tokenize,
    tokenize_request,
)
from tercet.frontend.api.sglang.generate_writer import GenerateWriter
from tercet.frontend.api.sglang.session_routes import SessionRoutes
from tercet.frontend.chat.images import check_images, take_images
from tercet.frontend.chat.messages import history
from tercet.frontend.chat.tool_prompt import for_template, with_instructions
from tercet.frontend.constraints import Constraint
from tercet.frontend.errors import ApiError, BadRequestError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.json_response import json_in_turn
from tercet.frontend.http.loop_turns import Steps, turns_of
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.inputs.images import tokenize
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.protocol.messages.values import Grammar, LoRAAdapter

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize")
DETOKENIZE_PATHS = ("/detokenize", "/v1/detokenize")
_DEFAULT_MAX_NEW_TOKENS = 128


class GenerateRoutes:
    """Endpoints for generation and tokenization."""

    def __init__(
        self, manager: TokenizerManager, sessions: SessionRoutes, ids: ClientIds, body_limit: int, reasoning_field: str
    ) -> None:
        self._manager = manager
        self._sessions = sessions
        self._ids = ids
        self._body_limit = body_limit
        self._tokenize = tokenize_request(reasoning_field)

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/generate", self.generate),
            *(Route("POST", path, self.tokenize) for path in TOKENIZE_PATHS),
            *(Route("POST", path, self.detokenize) for path in DETOKENIZE_PATHS),
        ]

    async def generate(self, request: Request) -> Response:
        """Generate from one prompt or several."""
        body = await read_model(request, NativeGenerate, self._body_limit)
        model, adapters = await self._models(body)
        converting, on_finished = to_generate_requests(body, model, adapters), None
        work = await turns_of(request).run(caller_of(request).owner, converting)
        rid = self._manager.new_id()
        client_id = None if body.rid is None else self._ids.add(caller_of(request).owner, body.rid, rid)
        writer = GenerateWriter(
            batch=body.is_batch,
            client_id=client_id,
            shows_prompt_ids=bool(body.return_prompt_token_ids),
            version=self._manager.weights.version,
        )
        if body.session_params is not None:
            [continued] = work
            continued, on_finished = await self._sessions.continue_session(
                request, body.session_params, continued, model
            )
            work = [continued]
        return await respond(
            request, self._manager, work, writer, stream=bool(body.stream), rid=rid, on_finished=on_finished
        )

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, of each of several, or of a chat rendered by the chat template."""
        body = await read_model(request, self._tokenize, self._body_limit)
        model = await self._manager.adapters.model_or_first(body.model)
        several = isinstance(body.prompt, list)
        found = [await tokenize(self._manager, prompt, model) for prompt in prompts_of(body, model)]
        fields: dict[str, list[Any]] = {"tokens": found, "count": list(map(len, found))}
        if body.return_token_strs:
            fields["token_strs"] = [await model.spell(ids) for ids in found]
        shown = fields if several else {name: values[0] for name, values in fields.items()}
        return await json_in_turn(request, {**shown, "max_model_len": model.context})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, or of each of several lists."""
        body = await read_model(request, Detokenize, self._body_limit)
        model = await self._manager.adapters.model_or_first(body.model)
        several = bool(body.tokens) and isinstance(body.tokens[0], list)
        texts = []
        for place, ids in enumerate(cast("list[list[int]]", body.tokens if several else [body.tokens])):
            param = f"tokens[{place}]" if several else "tokens"
            texts.append(await model.decode(ids, skip_special_tokens=bool(body.skip_special_tokens), param=param))
        shown = texts if several else texts[0]
        return await json_in_turn(request, {"prompt": shown, "text": shown})

    async def _models(self, body: NativeGenerate) -> tuple[ServedModel, dict[str, LoRAAdapter | None]]:
        """Return the model of a request, and its adapters by name. Raises ApiError."""
        params = body.adapters()
        found = {name: await self._adapter(name, param) for name, param in params.items()}
        first = next(iter(found.values()), None)
        model = await self._manager.adapters.model_or_first(
            first.base if first is not None and body.model is None else body.model
        )
        for name, each in found.items():
            if each.base != model.name:
                raise BadRequestError(f"The adapter {name!r} is not one of {model.name!r}.", param=params[name])
        return model, {name: each.lora for name, each in found.items()}

    async def _adapter(self, name: str, param: str) -> ServedModel:
        """Return the model with this adapter. Raises ApiError, which names `param`."""
        try:
            model = await self._manager.adapters.model(name)
        except ApiError as error:
            error.param = param
            raise
        if model.lora is None:
            raise BadRequestError(f"{name!r} is a model, not an adapter.", param=param)
        return model


def prompts_of(body: Tokenize, model: ServedModel) -> Sequence[Prompt]:
    """Return the prompts to tokenize: texts, or a chat with its tools. Raises BadRequestError."""
    if body.messages is None:
        special = body.add_special_tokens is not False
        if isinstance(body.prompt, list):
            return [TextPrompt(each, special, f"prompt[{place}]") for place, each in enumerate(body.prompt)]
        return [TextPrompt(body.prompt or "", special)]
    given, tools = history([message_of(message) for message in body.messages]), body.specs()
    messages, images = take_images(given, "messages", model)
    template = model.files.template
    if tools and template is not None and not template.supports_tools:
        messages = with_instructions(messages, tools, template.parsers.tools)
    chat = ChatPrompt(
        messages=messages,
        tools=for_template(tools) if tools else None,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        images=images,
    )
    return [chat]


def to_generate_requests(
    body: NativeGenerate, model: ServedModel, adapters: Mapping[str, LoRAAdapter | None]
) -> Steps[list[GenerateRequest]]:
    """Return one request for each prompt, with its adapter. Raises BadRequestError.

    Sampling parameters that all prompts share have one grammar, because its translation may take long.
    """
    requests: list[GenerateRequest] = []
    constraint: Constraint | None = None
    grammar: Grammar | None = None
    check_images(list(chain.from_iterable(body.images())), "audio_data" if body.audio_data else "image_data", model)
    for each in body.prompt_options():
        if not requests or isinstance(body.sampling_params, list):
            constraint = native_constraint_of(each.sampling, each.param("sampling_params"))
            grammar = to_grammar(constraint, model.tokens) if constraint else None
        options = _generation_options(each, body, constraint)
        lora = model.lora if each.adapter is None else adapters[each.adapter]
        requests.append(
            GenerateRequest(
                model=model.base,
                prompt=each.prompt,
                options=options,
                default_tokens=_DEFAULT_MAX_NEW_TOKENS,
                grammar=grammar,
                keeps_aborted=True,
                lora=lora,
            )
        )
        yield
    return requests


def _generation_options(each: PromptOptions, body: NativeGenerate, constraint: Constraint | None) -> GenerationOptions:
    requested = each.sampling
    return GenerationOptions(
        sampling=sampling_values(requested),
        n=requested.n or 1,
        max_tokens=requested.max_new_tokens,
        min_tokens=requested.min_new_tokens or 0,
        seed=requested.sampling_seed,
        stop=stop_strings(requested.stop),
        stop_token_ids=requested.stop_token_ids or [],
        include_stop=bool(requested.no_stop_trim),
        ignore_eos=bool(requested.ignore_eos),
        logit_bias=biases(requested.logit_bias),
        skip_special_tokens=requested.skip_special_tokens is not False,
        spaces_between_special_tokens=requested.spaces_between_special_tokens is not False,
        logprobs=each.logprobs,
        logprob_start=each.logprob_start,
        logprob_texts=bool(body.return_text_in_logprobs),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or body.extra_key or "",
        param_names=_param_names(each, constraint),
    )


def _param_names(each: PromptOptions, constraint: Constraint | None) -> ParamNames:
    """Return the names of a prompt's parameters."""
    params = each.param("sampling_params")
    return ParamNames(
        model="model" if each.adapter is None else each.param("lora_path"),
        max_tokens=f"{params}.max_new_tokens",
        min_tokens=f"{params}.min_new_tokens",
        n=f"{params}.n",
        stop=f"{params}.stop",
        stop_token_ids=f"{params}.stop_token_ids",
        logit_bias=f"{params}.logit_bias",
        logprobs=each.param("return_logprob"),
        logprob_start=each.param("logprob_start_len"),
        grammar=constraint.param if constraint else "",
    )
