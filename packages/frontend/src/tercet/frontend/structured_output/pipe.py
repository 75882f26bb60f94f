"""What a frontend and its grammar workers say to each other: msgpack after four bytes of length, over pipes."""

import msgspec

from tercet.protocol.messages.values import Grammar

LENGTH = 4


class GrammarVocabulary(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokenizer that the checks after it are made with. Answered with a Verdict, too."""

    tokenizer_json: bytes
    vocab_size: int
    eos: list[int]


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compile this in so many seconds of processor time."""

    grammar: Grammar
    seconds: float


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong; empty when nothing is."""

    error: str = ""


Order = GrammarVocabulary | Check

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_verdict = msgspec.msgpack.Decoder(GrammarVerdict).decode
_encode = msgspec.msgpack.Encoder().encode


def framed(message: Order | GrammarVerdict) -> bytes:
    """A message as it is written."""
    data = _encode(message)
    return len(data).to_bytes(LENGTH, "little") + data
