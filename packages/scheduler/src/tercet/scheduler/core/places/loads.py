"""Places in plans, and what they are loaded with."""

import msgspec

from tercet.protocol.messages.audio import AudioFormat, Transcript
from tercet.protocol.messages.encoder_input import EncoderInput
from tercet.protocol.messages.values import LoRAAdapter


class AdapterLoad(msgspec.Struct, frozen=True):
    """Load an adapter into an adapter slot. All choices with that slot use it from then on."""

    place: int
    adapter: LoRAAdapter
    rank: int = 0
    """Attention rank."""


class AudioLoad(msgspec.Struct, frozen=True):
    """Encode an audio clip into a place, for cross-attention. All choices with that place use it from then on."""

    place: int
    sha256: bytes


class TextLoad(msgspec.Struct, frozen=True):
    """Encode a text into a place, for cross-attention. All choices with that place use it from then on."""

    place: int
    ids: bytes
    """Tokens (int32 buffer)."""
    pages: list[int]
    """Pages of the place, in the order of their positions."""


class PlannedAudio(msgspec.Struct, frozen=True):
    """Place of the encoded audio of a choice, and the kind of its output."""

    place: int
    transcript: Transcript


class AudioCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Audio of a model, each of whose requests has one clip."""

    form: AudioFormat
    places: int
    """Number of places for encoded audio. Many choices can use each."""


class TextCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded texts of a model with an encoder and a decoder of text, each of whose requests has one."""

    form: EncoderInput
    places: int
    """Number of places for encoded texts. Many choices can use each."""
    pages: int
    """Pages that all places share."""
    page_size: int
    """Positions of a page."""
