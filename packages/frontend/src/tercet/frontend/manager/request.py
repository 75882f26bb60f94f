"""Generation request in terms that are independent of the endpoint."""

from typing import Any

import msgspec

from tercet.frontend.media.audio_decoder import DecodedAudio
from tercet.frontend.model.prompts import Prompt
from tercet.frontend.structured_output.composition import Composition
from tercet.protocol.messages.values import Grammar, LogprobParams, LoRAAdapter


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
    logprob_start: str = "logprob_start_len"
    reasoning_effort: str = "reasoning_effort"
    thinking_budget: str = "thinking_token_budget"
    grammar: str = "response_format"


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an answer that all endpoints share. Values are within the API's bounds; token ids are unchecked."""

    sampling: dict[str, Any] = {}
    """Numeric sampling parameters by their names in `SAMPLING_FIELDS`; those left out are neutral."""
    n: int = 1
    max_tokens: int | None = None
    """None means `GenerateRequest.default_tokens`, or fewer if the context ends earlier."""
    min_tokens: int = 0
    seed: int | None = None
    """None means a random one."""
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: LogprobParams | None = None
    logprob_start: int = 0
    """First prompt token that the answer shows a log-probability of, if those of the prompt are requested."""
    logprob_texts: bool = False
    """Log-probabilities come with the text of their tokens."""
    prediction: str = ""
    """Output that the client expects; it speeds up decoding and does not change the answer."""
    priority: int = 0
    cache_salt: str = ""
    param_names: ParamNames = ParamNames()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Generation of n choices for a prompt, of unchecked length."""

    model: str
    """Name of the base model; `lora` is the adapter added to it."""
    prompt: Prompt
    options: GenerationOptions = GenerationOptions()
    lora: LoRAAdapter | None = None
    default_tokens: int | None = None
    """None means the rest of the context."""
    stops_in_special_tokens: bool = True
    """False if special tokens are decoded for parsers only, and the client does not see their text."""
    shows_logprobs: bool = True
    """False if log-probabilities only rank the answers of `best_of`."""
    keeps_aborted: bool = False
    """An abort on demand ends the choices with their output so far; otherwise it fails the request."""
    grammar: Grammar | None = None
    """Constraint on the answer, compiled by `structured_output.compiler.to_grammar`."""
    composition: Composition | None = None
    """The constraints that the grammar is made of, if there are several."""
    trials: list[tuple[Grammar, str]] = []
    """Grammars that must compile even if they are not enforced, with the client's parameter name for each."""
    audio: DecodedAudio | None = None
    """Audio that the answer is about, for models that take it."""
    tenant: str = ""
    """Tenant id from `ApiKeyQuota.tenant`."""
