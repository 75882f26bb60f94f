"""The places of running choices."""

from typing import NamedTuple

from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.places.loads import AdapterLoad, AudioCapacity, AudioLoad, PlannedAudio, TextCapacity
from tercet.scheduler.core.places.places import Places
from tercet.scheduler.core.places.text_places import HeldText, TextPlaces
from tercet.scheduler.core.request import Req


class HeldAudio(NamedTuple):
    """Audio of one namespace of the prefix cache."""

    namespace: str
    sha256: bytes


class ChoicePlaces:
    """Places for adapters, and for encoded audio and texts. A choice has all that it needs, or waits."""

    def __init__(self, adapters: int, audio: AudioCapacity | None, texts: TextCapacity | None = None) -> None:
        self.adapters = Places[LoRAAdapter](adapters)
        self.audio = Places[HeldAudio](0 if audio is None else audio.places)
        self.texts = TextPlaces(texts)

    def has_room(self, req: Req) -> bool:
        """Return whether `take` would find places."""
        others = self.audio.has_room(held_audio(req)) and self.texts.has_room(held_text(req))
        return others and self.adapters.has_room(req.adapter)

    def take(self, req: Req) -> None:
        """Give a choice its places. Only valid if `has_room`."""
        req.adapter_slot = self.adapters.take(req.adapter)
        req.audio_place = self.audio.take(held_audio(req))
        req.text_place = self.texts.take(held_text(req))

    def release(self, req: Req) -> None:
        """Take the places of a choice that no plan in flight names."""
        self.adapters.release(req.adapter)
        self.audio.release(held_audio(req))
        self.texts.release(held_text(req))

    def reset(self) -> None:
        """Empty all places. No choice may have any."""
        self.adapters.reset()
        self.audio.reset()
        self.texts.reset()

    def pop_adapter_loads(self) -> list[AdapterLoad]:
        """Return the adapters that the next plan loads, and forget them."""
        return [AdapterLoad(*load) for load in self.adapters.pop_loads()]

    def pop_audio_loads(self) -> list[AudioLoad]:
        """Return the audio clips that the next plan encodes, and forget them."""
        return [AudioLoad(place, audio.sha256) for place, audio in self.audio.pop_loads()]


def held_audio(req: Req) -> HeldAudio | None:
    """Return the key of a choice's encoded audio; None without audio."""
    return None if req.audio is None else HeldAudio(req.salt, req.audio.sha256)


def held_text(req: Req) -> HeldText | None:
    """Return the key of a choice's encoded text; None without one."""
    return HeldText(req.salt, req.text) if req.text else None


def planned_audio(req: Req) -> PlannedAudio | None:
    """Return the place of a running choice's audio, and the kind of its output; None without audio."""
    return None if req.audio is None else PlannedAudio(req.audio_place, req.audio.transcript)
