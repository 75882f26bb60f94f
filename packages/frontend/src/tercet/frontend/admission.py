"""The last look at a request: what can only be checked with the model, and partly only once the prompt has a length."""

import secrets

import msgspec

from tercet.frontend.errors import BadRequestError, ContextLengthExceededError
from tercet.frontend.generate_request import GenerateRequest
from tercet.frontend.served_model import ServedModel
from tercet.protocol.values import SamplingParams

MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Of all stop strings of a request together: what detokenizers take."""


def check_stops(request: GenerateRequest) -> None:
    """Raises BadRequestError for more stop strings than a detokenizer takes."""
    if len(request.stop) > MAX_STOPS or sum(map(len, request.stop)) > MAX_STOP_CHARS:
        message = f"At most {MAX_STOPS} stop strings of {MAX_STOP_CHARS} characters in all are possible."
        raise BadRequestError(message, param="stop")


def sampling(request: GenerateRequest, model: ServedModel, prompt_tokens: int) -> SamplingParams:
    """Complete and check a request's sampling now that its prompt's length is known. Raises BadRequestError."""
    params, limits = request.sampling, model.limits
    context = model.context
    room = context - prompt_tokens
    if prompt_tokens == 0:
        raise BadRequestError("The prompt has no tokens.", param=request.prompt.param)
    wanted = request.max_tokens
    if wanted is None:
        wanted = max(min(room, request.default_tokens or room), 1)
    if wanted > room:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt_tokens + wanted} "
            f"tokens ({prompt_tokens} in the prompt, {wanted} in the completion).",
            param=request.max_tokens_param if prompt_tokens < context else request.prompt.param,
        )
    if params.min_new_tokens > wanted:
        raise BadRequestError("min_tokens is greater than the tokens to generate.", param="min_tokens")
    for param, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < limits.vocab_size:
                raise BadRequestError(f"{token_id} is not a token id of this model.", param=param)
    seed = request.seed if request.seed is not None else secrets.randbits(64)
    return msgspec.structs.replace(params, max_new_tokens=wanted, seed=seed & (2**64 - 1), grammar=request.grammar)
