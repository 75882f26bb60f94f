"""SGLang's /generate, /tokenize, /detokenize and /server_info endpoints, and the probes /health and /live."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.__about__ import __version__
from tercet.frontend.api.generation_response import respond
from tercet.frontend.api.openai.chat_messages import message_of
from tercet.frontend.api.openai.sampling_schema import biases, sampling_values, stop_strings
from tercet.frontend.api.openai.structured_schema import native_constraint_of
from tercet.frontend.api.sglang.generate_schema import (
    Detokenize,
    NativeGenerate,
    PromptOptions,
    Tokenize,
    tokenize_request,
)
from tercet.frontend.api.sglang.generate_writer import GenerateWriter
from tercet.frontend.api.sglang.session_routes import SessionRoutes
from tercet.frontend.chat.messages import history
from tercet.frontend.chat.tool_prompt import for_template, with_instructions
from tercet.frontend.constraints import Constraint
from tercet.frontend.errors import ApiError, BadRequestError, UnavailableError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.loop_turns import Steps, turns_of
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.protocol.messages.values import WIRE_VERSION, Grammar, LoRAAdapter

_DEFAULT_MAX_NEW_TOKENS = 128


class GenerateRoutes:
    """Endpoints for generation, tokenization, server information and probes."""

    def __init__(
        self, manager: TokenizerManager, sessions: SessionRoutes, body_limit: int, reasoning_field: str
    ) -> None:
        self._manager = manager
        self._sessions = sessions
        self._body_limit = body_limit
        self._tokenize = tokenize_request(reasoning_field)

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/generate", self.generate),
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
            Route("GET", "/server_info", self.server_info),
            Route("GET", "/health", self.health),
            Route("GET", "/live", self.live),
        ]

    async def generate(self, request: Request) -> Response:
        """Generate from one prompt or several."""
        body = await read_model(request, NativeGenerate, self._body_limit)
        model, adapters = await self._models(body)
        converting, on_finished = to_generate_requests(body, model, adapters), None
        work = await turns_of(request).run(caller_of(request).owner, converting)
        writer = GenerateWriter(batch=body.is_batch)
        if body.session_params is not None:
            [continued] = work
            continued, on_finished = await self._sessions.continue_session(
                request, body.session_params, continued, model
            )
            work = [continued]
        return await respond(request, self._manager, work, writer, stream=bool(body.stream), on_finished=on_finished)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a prompt, of each of several, or of a chat rendered by the chat template."""
        body = await read_model(request, self._tokenize, self._body_limit)
        model = await self._model(body.model)
        several = isinstance(body.prompt, list)
        found = [await model.tokenize(prompt, must_fit=False) for prompt in prompts_of(body, model)]
        fields: dict[str, list[Any]] = {"tokens": found, "count": list(map(len, found))}
        if body.return_token_strs:
            fields["token_strs"] = [await model.spell(ids) for ids in found]
        shown = fields if several else {name: values[0] for name, values in fields.items()}
        return _json({**shown, "max_model_len": model.context})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, or of each of several lists."""
        body = await read_model(request, Detokenize, self._body_limit)
        model = await self._model(body.model)
        several = bool(body.tokens) and isinstance(body.tokens[0], list)
        texts = []
        for place, ids in enumerate(cast("list[list[int]]", body.tokens if several else [body.tokens])):
            param = f"tokens[{place}]" if several else "tokens"
            texts.append(await model.decode(ids, skip_special_tokens=bool(body.skip_special_tokens), param=param))
        shown = texts if several else texts[0]
        return _json({"prompt": shown, "text": shown})

    async def server_info(self, request: Request) -> Response:  # noqa: ARG002
        """Return the models with their limits, and the load of every scheduler and detokenizer."""
        manager = self._manager
        fleet, counters = manager.fleet, manager.counters
        return _json(
            {
                "version": __version__,
                "wire_version": list(WIRE_VERSION),
                "frontend": manager.peer,
                "ready": manager.ready,
                "requests_running": manager.running,
                "requests_waiting": manager.waiting,
                "requests_ended": counters.outcomes,
                "requests_over_limit": counters.over_limit,
                "requests_resumed_and_finished": counters.resumed_finished,
                "redispatches": counters.redispatches,
                "deaths": counters.deaths,
                "models": [_describe(model) for model in manager.models],
                "schedulers": [
                    {
                        "peer": each.peer,
                        "incarnation": each.incarnation,
                        "ready": each.ready,
                        "phase": each.heartbeat.phase,
                        "model": each.limits.model if each.limits else None,
                        "load": {name: getattr(each.load, name) for name in each.load.__struct_fields__},
                    }
                    for each in fleet.schedulers.values()
                ],
                "detokenizers": [
                    {
                        "peer": each.peer,
                        "incarnation": each.incarnation,
                        "ready": each.ready,
                        "phase": each.heartbeat.phase,
                        "choices": each.load.running,
                    }
                    for each in fleet.detokenizers.values()
                ],
            }
        )

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """Return 200, or 503 while draining or while no scheduler or no detokenizer is ready."""
        if self._manager.draining:
            raise UnavailableError("The server is about to leave.", retry_after=1)
        if not self._manager.ready:
            raise UnavailableError("No scheduler or no detokenizer is ready.", retry_after=1)
        return _json({"status": "ok"})

    async def live(self, request: Request) -> Response:  # noqa: ARG002
        """Return 200 while the process runs."""
        return _json({"status": "ok"})

    async def _models(self, body: NativeGenerate) -> tuple[ServedModel, dict[str, LoRAAdapter | None]]:
        """Return the model of a request, and its adapters by name. Raises ApiError."""
        params = body.adapters()
        found = {name: await self._adapter(name, param) for name, param in params.items()}
        first = next(iter(found.values()), None)
        model = await self._model(first.base if first is not None and body.model is None else body.model)
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
            raise BadRequestError(f"{name!r} is a model, and no adapter.", param=param)
        return model

    async def _model(self, name: str | None) -> ServedModel:
        """Return the named model, or the first one without a name."""
        if name is not None:
            return await self._manager.adapters.model(name)
        return next(iter(self._manager.models), None) or self._manager.models.get("")


def prompts_of(body: Tokenize, model: ServedModel) -> Sequence[Prompt]:
    """Return the prompts to tokenize: texts, or a chat with its tools. Raises BadRequestError."""
    if body.messages is None:
        special = body.add_special_tokens is not False
        if isinstance(body.prompt, list):
            return [TextPrompt(each, special, f"prompt[{place}]") for place, each in enumerate(body.prompt)]
        return [TextPrompt(body.prompt or "", special)]
    messages, tools = history([message_of(message) for message in body.messages]), body.specs()
    template = model.files.template
    if tools and template is not None and not template.supports_tools:
        messages = with_instructions(messages, tools, template.parsers.tools)
    chat = ChatPrompt(
        messages=messages,
        tools=for_template(tools) if tools else None,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
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
        cache_salt=body.cache_salt or "",
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


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "context_length": model.limits.context_length,
        "max_total_tokens": model.limits.max_total_tokens,
        "vocab_size": model.limits.vocab_size,
        "weights": model.identity.weights,
        "grammars": model.limits.grammars or None,
        "max_loras": model.limits.max_loras,
        "has_chat_template": model.files.template is not None,
    }


def _json(value: object) -> Response:
    # The counters have enumerations as keys.
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")
