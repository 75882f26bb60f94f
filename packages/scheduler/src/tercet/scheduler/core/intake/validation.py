"""Validation of requests. The frontend has checked the same; this protects the scheduler from one that did not.

A request that passes can neither raise in the core or the executor nor overflow a field of an output row.
"""

import re
from collections.abc import Iterable, Sequence

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import SAMPLING_FIELDS, LogprobParams, LoRAAdapter, SamplingParams
from tercet.scheduler.core.places.loads import TextCapacity

LONGEST_NAME = 512
"""Maximum characters of a request's id, its salt, its tenant and its detokenizer."""
MOST_BIASES = 1024
MOST_STOP_IDS = 1024
MOST_TOP_LOGPROBS = 256
LONGEST_GRAMMAR = 1 << 20
"""Maximum characters of a grammar."""
LONGEST_MARKER = 256
"""Maximum characters of a marker of reasoning."""
MOST_PREDICTED = 131_072
"""Maximum tokens of a prediction."""
INT32 = 2**31 - 1
LONGEST_PATH = 4096
"""Maximum characters of an adapter's path."""
LARGE = 1e6
"""Limit of a bias; larger ones would only overflow."""

_HASH_BYTES = 32
_SHA256 = re.compile(r"[0-9a-f]{64}")


def request_error(request: TokenizedGenerateReqInput, vocab_size: int) -> str | None:
    """Return what is wrong with a request's form, or None. `invalid_ids` checks token ids."""
    names = ("rid", request.rid), ("salt", request.cache_salt), ("tenant", request.tenant)
    for name, text in (*names, ("detokenizer", request.detokenizer)):
        if len(text) > LONGEST_NAME:
            return f"the {name} has {len(text)} characters; {LONGEST_NAME} are allowed"
    numbers = (("attempt", request.attempt, 0, INT32), ("priority", request.priority, -INT32 - 1, INT32))
    return (
        _out_of_range(numbers)
        or _fault_in_choices(request)
        or (_fault_in_adapter(request.lora) if request.lora else None)
        or _fault_in_sampling(request.sampling, vocab_size)
        or (_fault_in_logprobs(request.logprobs, vocab_size) if request.logprobs else None)
    )


def audio_error(request: TokenizedGenerateReqInput, *, takes_audio: bool) -> str | None:
    """Return the fault in the audio of a request, or None."""
    if request.audio is None:
        return "this model turns audio into text, and the request has no audio" if takes_audio else None
    if not takes_audio:
        return "this scheduler takes no audio"
    return None if len(request.audio.sha256) == _HASH_BYTES else "the audio's hash has another length"


def text_error(request: TokenizedGenerateReqInput, texts: TextCapacity | None) -> str | None:
    """Return the fault in the encoder's input of a request, or None."""
    tokens = len(request.encoder_ids) // 4
    if texts is None:
        return "this model has no encoder of text" if tokens else None
    if not 0 < tokens <= texts.form.tokens:
        return f"the encoder's input has {tokens} tokens; 1 to {texts.form.tokens} are possible here"
    return None


def invalid_ids(vocab_size: int, *parts: Sequence[int]) -> bool:
    """Return whether any id is outside the vocabulary."""
    return any(min(part) < 0 or max(part) >= vocab_size for part in parts if len(part))


def _fault_in_choices(request: TokenizedGenerateReqInput) -> str | None:
    count = request.sampling.n
    bounds = SAMPLING_FIELDS["n"].wire
    if not bounds.least <= count <= bounds.greatest:
        return f"n is {count}; it can be {bounds.least} to {bounds.greatest}"
    indices = [choice.index for choice in request.resume]
    if len(set(indices)) != len(indices) or any(not 0 <= index < count for index in indices):
        return "the choices to resume are repeated or are not choices of this request"
    known = (choice.output_ids for choice in request.resume)
    buffers = request.input_ids, request.encoder_ids, request.prediction, *known
    if any(len(part) % 4 for part in buffers):
        return "a buffer of token ids is torn"
    if len(request.prediction) > 4 * MOST_PREDICTED:
        return f"the prediction has more than {MOST_PREDICTED} tokens"
    return None


def _fault_in_adapter(adapter: LoRAAdapter) -> str | None:
    if not 0 < len(adapter.path) <= LONGEST_PATH:
        return f"the adapter's path has {len(adapter.path)} characters; 1 to {LONGEST_PATH} are allowed"
    if not _SHA256.fullmatch(adapter.sha256):
        return "the adapter's sha256 is none"
    return None


def _fault_in_sampling(sampling: SamplingParams, vocab_size: int) -> str | None:
    ids = [*sampling.stop_token_ids, *sampling.logit_bias]
    if len(sampling.stop_token_ids) > MOST_STOP_IDS or len(sampling.logit_bias) > MOST_BIASES:
        return f"more than {MOST_STOP_IDS} stop ids or {MOST_BIASES} biases"
    if invalid_ids(vocab_size, ids):
        return "a stop id or a biased id is outside the vocabulary"
    if sampling.grammar is not None and len(sampling.grammar.text) > LONGEST_GRAMMAR:
        return f"the grammar has more than {LONGEST_GRAMMAR} characters"
    if (budget := sampling.grammar.thinking if sampling.grammar is not None else None) is not None and (
        budget.tokens < 0 or not 0 < len(budget.end) <= LONGEST_MARKER or len(budget.begin) > LONGEST_MARKER
    ):
        return "the grammar's budget of reasoning is negative, or its markers are too short or too long"
    if not all(abs(bias) <= LARGE for bias in sampling.logit_bias.values()):  # also refuses NaN
        return f"a bias is beyond {LARGE:.0f}"
    return _out_of_range(
        (name, getattr(sampling, name), field.wire.least, field.wire.greatest)
        for name, field in SAMPLING_FIELDS.items()
    )


def _fault_in_logprobs(wanted: LogprobParams, vocab_size: int) -> str | None:
    return _out_of_range((("logprobs.top", wanted.top, 0, min(vocab_size, MOST_TOP_LOGPROBS)),))


def _out_of_range(numbers: Iterable[tuple[str, float, float, float]]) -> str | None:
    for name, value, low, high in numbers:
        if not low <= value <= high:  # also refuses NaN
            return f"{name} cannot be {value}"
    return None
