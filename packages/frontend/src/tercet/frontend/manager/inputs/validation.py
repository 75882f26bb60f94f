"""Validation of requests that needs the model, and partly the length of the prompt."""

import secrets
from collections.abc import Sequence

from tercet.frontend.errors import BadRequestError, ContextLengthExceededError, UnsupportedParameterError
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.prompts import ChatPrompt, TextPrompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import SamplingParams

MAX_SCORES = 2_097_152
"""Maximum log-probabilities in one answer: each costs up to 5 µs of the event loop and 60 bytes of JSON."""
MAX_OUTPUT = 4_194_304
"""Maximum output tokens of one request: the sum over prompts of choices times tokens to generate."""
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Total characters of all stop strings of a request that detokenizers accept."""


def check_stops(request: GenerateRequest) -> None:
    """Raise BadRequestError for more stop strings than a detokenizer accepts."""
    stop = request.options.stop
    if len(stop) > MAX_STOPS or sum(map(len, stop)) > MAX_STOP_CHARS:
        message = f"At most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters in all are possible."
        raise BadRequestError(message, param=request.options.param_names.stop)


def check_length(request: GenerateRequest, model: ServedModel) -> None:
    """Refuse a prompt that certainly does not fit before it is tokenized. Raises BadRequestError."""
    match request.prompt:
        case TokenPrompt(ids):
            sampling(request, model, len(ids))
        case TextPrompt(text):
            model.check_length(text, request.prompt.param)
            _check_context(request, model, model.tokenizer.fewest_tokens(text), request.options.max_tokens or 0)
        case ChatPrompt():
            pass  # its length depends on the template


def check_output(requests: Sequence[GenerateRequest], params: Sequence[SamplingParams]) -> None:
    """Raise BadRequestError for a request for too many output tokens. `params` must be complete."""
    tokens = sum(chosen.n * chosen.max_new_tokens for chosen in params)
    if tokens > MAX_OUTPUT:
        names = requests[0].options.param_names
        raise BadRequestError(
            f"The answer could have {tokens} tokens: choices times tokens to generate. "
            f"At most {MAX_OUTPUT} are possible.",
            param=names.n if params[0].n > 1 else names.max_tokens,
        )


def check_scores(requests: Sequence[GenerateRequest], params: Sequence[SamplingParams], prompts: Sequence[int]) -> None:
    """Raise BadRequestError for an answer with too many log-probabilities.

    `params` must be complete; `prompts` are the prompts' lengths in tokens.
    """
    # Schedulers return as many alternatives for prompt tokens as for output tokens, even if fewer are shown.
    scores = sum(
        chosen.n * (length * logprobs.prompt + chosen.max_new_tokens) * (1 + logprobs.top)
        for request, chosen, length in zip(requests, params, prompts, strict=True)
        if (logprobs := request.options.logprobs) is not None and request.shows_logprobs
    )
    if scores > MAX_SCORES:
        options = requests[0].options
        raise BadRequestError(
            f"The answer could have {scores} log-probabilities: choices times tokens, with those of a prompt that "
            f"is scored, times one more than the alternatives of each. At most {MAX_SCORES} are possible.",
            param=options.param_names.n if options.n > 1 else options.param_names.logprobs,
        )


def sampling(request: GenerateRequest, model: ServedModel, prompt_tokens: int) -> SamplingParams:
    """Return the sampling parameters for a prompt of known length. Raises BadRequestError."""
    options, limits = request.options, model.limits
    names = options.param_names
    if prompt_tokens == 0:
        raise BadRequestError("The prompt has no tokens.", param=request.prompt.param)
    if options.logprob_start > prompt_tokens:
        message = f"'{names.logprob_start}' is {options.logprob_start}, and the prompt has {prompt_tokens} tokens."
        raise BadRequestError(message, param=names.logprob_start)
    room = model.context - model.context_tokens(prompt_tokens, request.prompt.param)
    output = options.max_tokens
    if output is None:
        output = max(min(room, request.default_tokens or _max_output(request, prompt_tokens)), 1)
    _check_context(request, model, prompt_tokens, output)
    if options.min_tokens > output:
        message = f"'{names.min_tokens}' is greater than the tokens to generate."
        raise BadRequestError(message, param=names.min_tokens)
    for param, ids in ((names.logit_bias, options.logit_bias), (names.stop_token_ids, options.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < limits.vocab_size:
                raise BadRequestError(f"{token_id} is not a token id of this model.", param=param)
    seed = options.seed if options.seed is not None else secrets.randbits(64)
    return SamplingParams(
        max_new_tokens=output,
        min_new_tokens=options.min_tokens,
        n=options.n,
        seed=seed & (2**64 - 1),
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logit_bias=options.logit_bias,
        grammar=request.grammar,
        **options.sampling,
    )


def cheap_checks(requests: Sequence[GenerateRequest], model: ServedModel) -> Steps[None]:
    """Check what needs no tokens. Raises BadRequestError."""
    for request in requests:
        model.check_audio(given=request.audio is not None)
        _check_encoder(request, model)
        check_stops(request)
        check_length(request, model)
        yield


def sampling_of_all(
    requests: Sequence[GenerateRequest], model: ServedModel, prompts: Sequence[Sequence[int]]
) -> Steps[list[SamplingParams]]:
    """Return the sampling parameters of prompts with these tokens. Raises BadRequestError."""
    params = []
    for request, ids in zip(requests, prompts, strict=True):
        params.append(sampling(request, model, len(ids)))
        yield
    return params


def _check_encoder(request: GenerateRequest, model: ServedModel) -> None:
    """Raise UnsupportedParameterError for log-probabilities of a prompt that an encoder reads."""
    logprobs = request.options.logprobs
    if model.limits.encoder is not None and logprobs is not None and logprobs.prompt:
        message = "The encoder of this model reads the prompt, whose tokens have no log-probabilities."
        raise UnsupportedParameterError(message, param=request.options.param_names.logprobs)


def _check_context(request: GenerateRequest, model: ServedModel, prompt_tokens: int, output: int) -> None:
    """Raise ContextLengthExceededError if prompt and output exceed the context."""
    context, prompt_tokens = model.context, model.context_tokens(prompt_tokens, request.prompt.param)
    if prompt_tokens + output > context:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt_tokens + output} "
            f"tokens ({prompt_tokens} in the prompt, {output} in the completion).",
            param=request.options.param_names.max_tokens if prompt_tokens < context else request.prompt.param,
            prompt=prompt_tokens,
            output=output,
            context=context,
        )


def _max_output(request: GenerateRequest, prompt_tokens: int) -> int:
    """Return the maximum output tokens per choice, given the limits on output and on log-probabilities."""
    n, logprobs = request.options.n, request.options.logprobs
    if logprobs is None or not request.shows_logprobs:
        return MAX_OUTPUT // n
    scored = MAX_SCORES // (n * (1 + logprobs.top))
    return min(MAX_OUTPUT // n, scored - prompt_tokens * logprobs.prompt)
