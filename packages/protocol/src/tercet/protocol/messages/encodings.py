"""Images and sounds that go to a scheduler with the tower alone. Since 1.1; not every process decodes these."""

from tercet.protocol.messages.messages import Message
from tercet.protocol.messages.values import FinishReason


class EncodeMediaReq(Message, frozen=True, kw_only=True):
    """Image or sound whose array is a raw frame, for a scheduler with `Ready.encoder`.

    Its only choice has index 0, whose only position is 0.
    """

    rid: str
    attempt: int
    sha256: bytes
    """Hash of the array, as in ImageInput or SoundInput."""
    height: int = 0
    width: int = 0
    """Size of an image; 0 for a sound."""
    samples: int = 0
    """Samples of a sound; 0 for an image."""
    cache_salt: str = ""
    priority: int = 0
    exclusive: bool = False
    deferred: bool = False
    tenant: str = ""
    """The last five are as in TokenizedGenerateReqInput."""


class EncodedMedia(Message, frozen=True, kw_only=True):
    """Embeddings in one raw frame [embeddings, width], in the dtype of `Ready.encoder`; no frame with a finish."""

    rid: str
    attempt: int
    finish: FinishReason | None = None
    """Reason why there are no embeddings."""
    queue_time: float | None = None
    """Seconds from the arrival to the step; None if no step had it."""
