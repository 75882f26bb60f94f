"""What every endpoint turns its JSON into: one prompt and how to go on from it."""

import msgspec

from tercet.frontend.model.prompts import Prompt
from tercet.protocol.messages.values import Grammar, LogprobParams, LoRAAdapter, SamplingParams


class ParamNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the client's parameters are called, for error messages; by default as in chat completions."""

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
    """One prompt, n continuations. Values are within the bounds of the API; only lengths and ids are still to check.

    `sampling.max_new_tokens` and `.seed` are filled in from `max_tokens` and `seed` once the prompt's length is known.
    """

    model: str
    """The name of the model itself. `lora` is the adapter that is added to it."""
    prompt: Prompt
    sampling: SamplingParams
    lora: LoRAAdapter | None = None
    max_tokens: int | None = None
    """None goes on for `default_tokens`, or less where the context ends."""
    default_tokens: int | None = None
    """None is all that the context has room for."""
    seed: int | None = None
    stop: list[str] = []
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stops_in_special_tokens: bool = True
    """False where special tokens have text for parsers, which the client does not see."""
    logprobs: LogprobParams | None = None
    shows_logprobs: bool = True
    """False if log-probabilities are computed only to choose the best answers, and not shown."""
    grammar: Grammar | None = None
    """What the answer must be an instance of: `grammar.compiler.to_grammar` of a constraint."""
    trials: list[tuple[Grammar, str]] = []
    """Grammars that have to compile, whether or not any is enforced, each with the client's name for it."""
    prediction: str = ""
    """What the client expects the answer to be, which changes nothing of it."""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    """Whose it is, by `ApiKeyQuota.tenant`."""
    param_names: ParamNames = ParamNames()
