"""Raw frames of requests: arrays of images, samples of audio clips."""

from collections.abc import Collection, Mapping

from tercet.protocol.messages.codec import Frame


class FrameStore:
    """Frames by hash, as long as a held choice needs them. The loop keeps and retains, the executor reads.

    `kind` names them in faults.
    """

    def __init__(self, kind: str, most_bytes: int) -> None:
        self.kind = kind
        self._most_bytes = most_bytes
        self._bytes = 0
        self._frames: dict[bytes, Frame] = {}

    def keep(self, frames: Mapping[bytes, Frame]) -> str:
        """Keep frames without copying them. Return a fault, or an empty text."""
        new = {sha256: frame for sha256, frame in frames.items() if sha256 not in self._frames}
        total = self._bytes + sum(memoryview(frame).nbytes for frame in new.values())
        if total > self._most_bytes:
            return f"too many {self.kind} are held"
        self._bytes = total
        self._frames.update(new)
        return ""

    def retain(self, needed: Collection[bytes]) -> None:
        """Drop all other frames."""
        for sha256 in self._frames.keys() - needed:
            self._bytes -= memoryview(self._frames.pop(sha256)).nbytes

    def __contains__(self, sha256: bytes) -> bool:
        return sha256 in self._frames

    def frame(self, sha256: bytes) -> Frame:
        """Return a frame. Raise KeyError if it was never kept or is dropped."""
        return self._frames[sha256]
