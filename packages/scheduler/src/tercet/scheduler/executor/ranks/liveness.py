"""Timer of a peer's heartbeats: when its silence means that it died, hangs or is cut off."""

INTERVAL = 0.25
"""Seconds between heartbeats of a rank or a host, and between checks for those of others."""
SILENCE = 2.25
"""Seconds without a heartbeat after which a rank or a host counts as dead."""
LOADING_SILENCE = 60.0
"""The same limit while it loads, when imports can block every thread of a process."""
_SUSPENDED = 1.0
"""Seconds between two checks above which this process was suspended: silence in that time does not count."""


class SilenceTimer:
    """Timer of one peer, with the time passed in. Call `expired` every `INTERVAL`."""

    def __init__(self, now: float) -> None:
        self._heard = self._checked = now
        self._limit = LOADING_SILENCE
        self.silence = 0.0
        """Seconds of silence at the last check."""

    def heard(self, now: float, *, loading: bool) -> None:
        """Note a heartbeat of the peer, which says whether it loads."""
        self._heard = now
        self._limit = LOADING_SILENCE if loading else SILENCE

    def expired(self, now: float) -> bool:
        """Return whether the peer has been silent for too long."""
        if now - self._checked > _SUSPENDED:
            self._heard += now - self._checked
        self._checked = now
        self.silence = now - self._heard
        return self.silence > self._limit
