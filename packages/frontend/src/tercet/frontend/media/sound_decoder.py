"""`SoundDecoder`: sounds in prompts as the samples that a model takes, decoded by an `AudioDecoder`."""

import asyncio

import msgspec

from tercet.frontend.media.audio_decoder import AudioDecoder, refused_audio, sha256_of
from tercet.protocol.messages.audio import SoundFormat


class SoundSource(msgspec.Struct, frozen=True, kw_only=True):
    """Sound of a request before it is decoded."""

    base64: str
    """The file."""
    param: str
    """Client's parameter name for error messages."""


class DecodedSound(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a sound, int16 of one channel, and their SHA-256."""

    array: bytes
    sha256: bytes

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return len(self.array) // 2


class SoundDecoder:
    """Decoder of sounds that are no longer than the model hears."""

    def __init__(self, audio: AudioDecoder) -> None:
        self._audio = audio

    async def decode(self, source: SoundSource, form: SoundFormat) -> DecodedSound:
        """Return a sound in the form that a model takes. Raises ApiError."""
        array = await self._audio.decode_sound(source.base64, form.rate, form.samples, source.param)
        sound = DecodedSound(array=array, sha256=await asyncio.to_thread(sha256_of, array))
        if not form.fits(sound.samples):
            seconds = form.least_samples / form.rate
            raise refused_audio(f"the model hears at least {seconds:.3f} s", source.param)
        return sound
