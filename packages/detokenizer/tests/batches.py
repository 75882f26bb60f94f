"""Tokens of one choice, as a scheduler sends them."""

import msgspec

from tercet.protocol.messages.messages import BatchTokenIDOutput, DecodeSpec, FirstRow
from tercet.protocol.messages.values import FinishReason, pack_ints


def batch(ids: list[int], position: int = 0, finish: FinishReason | None = None) -> BatchTokenIDOutput:
    opening = FirstRow(
        row=0, frontend="f", decode_spec=msgspec.msgpack.encode(DecodeSpec()), prompt_tokens=3, cached_tokens=1
    )
    return BatchTokenIDOutput(
        rids=["r"],
        indices=pack_ints([0]),
        attempts=pack_ints([0]),
        positions=pack_ints([position]),
        offsets=pack_ints([0, len(ids)]),
        token_ids=pack_ints(ids),
        openings=[] if position else [opening],
        finishes={} if finish is None else {0: finish},
    )
