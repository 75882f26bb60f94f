"""Test doubles: an engine that follows a script, and a frontend on a real port in front of it."""

from tercet.frontend.testing.encoding_engine import EncodingEngine
from tercet.frontend.testing.engine import DETOKENIZER, FakeEngine, Script, Token, decode_spec
from tercet.frontend.testing.managing import managed, received_choices, submit
from tercet.frontend.testing.serving import Served, serving

__all__ = [
    "DETOKENIZER",
    "EncodingEngine",
    "FakeEngine",
    "Script",
    "Served",
    "Token",
    "decode_spec",
    "managed",
    "received_choices",
    "serving",
    "submit",
]
