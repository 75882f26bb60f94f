"""Places in plans, and what they are loaded with."""

import msgspec

from tercet.protocol.messages.sound import SoundFormat, Transcript
from tercet.protocol.messages.values import LoRAAdapter


class AdapterLoad(msgspec.Struct, frozen=True):
    """Load an adapter into an adapter slot. All choices with that slot use it from then on."""

    place: int
    adapter: LoRAAdapter


class SoundLoad(msgspec.Struct, frozen=True):
    """Encode a sound into a place, for cross-attention. All choices with that place use it from then on."""

    place: int
    sha256: bytes


class PlannedSound(msgspec.Struct, frozen=True):
    """Place of the encoded sound of a choice, and the kind of its output."""

    place: int
    transcript: Transcript


class SoundCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Sound of a model, whose every request has one."""

    form: SoundFormat
    places: int
    """Number of places for encoded sound. Many choices can use each."""
    positions: int
    """Positions of the encoder for each sound, which count as tokens of the step that encodes it."""
