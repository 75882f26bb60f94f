"""Validation of inputs, the counterpart of `core.intake.validation` for encoders."""

from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.embedding.plan import EncoderCapacity
from tercet.scheduler.core.intake.validation import INT32, LONGEST_NAME, invalid_ids

Fault = tuple[str, str]
"""(OpenAI error code, description of the error)"""


def input_error(request: TokenizedEmbeddingReqInput, capacity: EncoderCapacity) -> Fault | None:
    """Return why an input can have no vector here, or None.

    A valid input raises neither in the core nor the executor.
    """
    for name, given in (("rid", request.rid), ("tenant", request.tenant)):
        if len(given) > LONGEST_NAME:
            return "invalid_request", f"the {name} has {len(given)} characters; {LONGEST_NAME} are allowed"
    if not 0 <= request.attempt <= INT32 or not -INT32 - 1 <= request.priority <= INT32:
        return "invalid_request", "the attempt or the priority is out of range"
    if len(request.input_ids) % 4 or len(request.token_types) not in {0, len(request.input_ids)}:
        return "invalid_request", "a buffer is torn, or there is not one type for each token"
    ids = unpack_ints(request.input_ids)
    if len(ids) > capacity.context_length:
        message = f"the input has {len(ids)} tokens; at most {capacity.context_length} are possible here"
        return "context_length_exceeded", message
    if not ids or invalid_ids(capacity.vocab_size, ids):
        return "invalid_token_ids", "the input is empty or holds a token id outside the vocabulary"
    if capacity.token_types > 1 and invalid_ids(capacity.token_types, unpack_ints(request.token_types)):
        return "invalid_request", f"a token type is none of the model's {capacity.token_types}"
    return None
