"""Images and sounds that go to a scheduler with the tower alone. Since 1.1; not every process decodes these."""

from tercet.protocol.messages.audio import SoundInput
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import Message
from tercet.protocol.messages.values import FinishReason


class EncodeMediaReq(Message, frozen=True, kw_only=True):
    """Image or sound whose array is a raw frame, for a scheduler with `Ready.encoder`.

    Its only choice has index 0, whose only position is 0.
    """

    rid: str
    attempt: int
    image: ImageInput | None = None
    sound: SoundInput | None = None
    """One of the two. Its place in a prompt has no meaning."""
    cache_salt: str = ""
    priority: int = 0
    exclusive: bool = False
    deferred: bool = False
    tenant: str = ""
    """The last five are as in TokenizedGenerateReqInput."""

    @property
    def media(self) -> ImageInput | SoundInput | None:
        """Return the image or the sound; None for neither or both."""
        return (self.image or self.sound) if self.image is None or self.sound is None else None


class EncodedMedia(Message, frozen=True, kw_only=True):
    """Embeddings in one raw frame [embeddings, width], in the dtype of `Ready.encoder`; no frame with a finish."""

    rid: str
    attempt: int
    finish: FinishReason | None = None
    """Reason why there are no embeddings."""
    queue_time: float | None = None
    """Seconds from the arrival to the step; None if no step had it."""
