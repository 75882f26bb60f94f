"""The places of running choices."""

from typing import NamedTuple

from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.places.loads import AdapterLoad, PlannedSound, SoundCapacity, SoundLoad
from tercet.scheduler.core.places.places import Places
from tercet.scheduler.core.request import Req


class HeldSound(NamedTuple):
    """Sound of one namespace of the prefix cache."""

    namespace: str
    sha256: bytes


class ChoicePlaces:
    """Places for adapters and for encoded sound. A choice has both, or waits."""

    def __init__(self, adapters: int, sound: SoundCapacity | None) -> None:
        self.adapters = Places[LoRAAdapter](adapters)
        self.sounds = Places[HeldSound](0 if sound is None else sound.places)
        self._positions = 0 if sound is None else sound.positions

    def has_room(self, req: Req) -> bool:
        """Return whether `take` would find places."""
        return self.adapters.has_room(req.adapter) and self.sounds.has_room(held_sound(req))

    def take(self, req: Req) -> None:
        """Give a choice its places. Only valid if `has_room`."""
        req.adapter_slot = self.adapters.take(req.adapter)
        req.sound_place = self.sounds.take(held_sound(req))

    def release(self, req: Req) -> None:
        """Take the places of a choice that no plan in flight names."""
        self.adapters.release(req.adapter)
        self.sounds.release(held_sound(req))

    def reset(self) -> None:
        """Empty all places. No choice may have any."""
        self.adapters.reset()
        self.sounds.reset()

    @property
    def positions_to_encode(self) -> int:
        """Positions of the encoder that the next plan computes."""
        return len(self.sounds.loads) * self._positions

    def pop_adapter_loads(self) -> list[AdapterLoad]:
        """Return the adapters that the next plan loads, and forget them."""
        return [AdapterLoad(*load) for load in self.adapters.pop_loads()]

    def pop_sound_loads(self) -> list[SoundLoad]:
        """Return the sounds that the next plan encodes, and forget them."""
        return [SoundLoad(place, sound.sha256) for place, sound in self.sounds.pop_loads()]


def held_sound(req: Req) -> HeldSound | None:
    """Return the key of a choice's encoded sound; None without sound."""
    return None if req.sound is None else HeldSound(req.salt, req.sound.sha256)


def planned_sound(req: Req) -> PlannedSound | None:
    """Return the place of a running choice's sound, and the kind of its output; None without sound."""
    return None if req.sound is None else PlannedSound(req.sound_place, req.sound.transcript)
