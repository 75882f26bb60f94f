"""Messages between a frontend and its grammar workers."""

import msgspec

from tercet.protocol.messages.values import Grammar


class GrammarVocabulary(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokenizer for the checks that follow. The reply is a GrammarVerdict, too."""

    tokenizer_json: bytes
    vocab_size: int
    eos: list[int]


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Order to compile a grammar within `seconds` of processor time."""

    grammar: Grammar
    seconds: float


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an order: the fault of the grammar, or empty."""

    error: str = ""


Order = GrammarVocabulary | Check

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_verdict = msgspec.msgpack.Decoder(GrammarVerdict).decode
