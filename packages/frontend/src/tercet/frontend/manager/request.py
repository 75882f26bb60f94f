"""Generation request in terms that are independent of the endpoint."""

import msgspec

from tercet.frontend.model.prompts import Prompt
from tercet.protocol.messages.values import Grammar, LogprobParams, LoRAAdapter, SamplingParams


class ParamNames(msgspec.Struct, frozen=True, kw_only=True):
    """Client-facing parameter names for error messages; the defaults are those of chat completions."""

    model: str = "model"
    messages: str = "messages"
    max_tokens: str = "max_tokens"
    min_tokens: str = "min_tokens"
    n: str = "n"
    stop: str = "stop"
    stop_token_ids: str = "stop_token_ids"  # noqa: S105
    logit_bias: str = "logit_bias"
    logprobs: str = "logprobs"
    reasoning_effort: str = "reasoning_effort"
    thinking_budget: str = "thinking_token_budget"
    grammar: str = "response_format"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Generation of n choices for a prompt. Values are within the API's bounds; lengths and ids are unchecked.

    `sampling.max_new_tokens` and `.seed` are set from `max_tokens` and `seed` once the prompt's length is known.
    """

    model: str
    """Name of the base model; `lora` is the adapter added to it."""
    prompt: Prompt
    sampling: SamplingParams
    lora: LoRAAdapter | None = None
    max_tokens: int | None = None
    """None means `default_tokens`, or fewer if the context ends earlier."""
    default_tokens: int | None = None
    """None means the rest of the context."""
    seed: int | None = None
    stop: list[str] = []
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stops_in_special_tokens: bool = True
    """False if special tokens are decoded for parsers only, and the client does not see their text."""
    logprobs: LogprobParams | None = None
    shows_logprobs: bool = True
    """False if log-probabilities only rank the answers of `best_of`."""
    grammar: Grammar | None = None
    """Constraint on the answer, compiled by `structured_output.compiler.to_grammar`."""
    trials: list[tuple[Grammar, str]] = []
    """Grammars that must compile even if they are not enforced, with the client's parameter name for each."""
    prediction: str = ""
    """Output that the client expects; it speeds up decoding and does not change the answer."""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    """Tenant id from `ApiKeyQuota.tenant`."""
    param_names: ParamNames = ParamNames()
