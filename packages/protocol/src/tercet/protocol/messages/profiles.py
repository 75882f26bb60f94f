"""Profiles of a scheduler's steps. Since 1.1; not every scheduler decodes these."""

from tercet.protocol.messages.messages import Message


class StartProfileReq(Message, frozen=True, kw_only=True):
    """Starts a profile. The reply's message is the file on the scheduler's machine, written when the profile ends."""

    id: str
    name: str
    """Prefix of the file's name: letters, digits, underscores and hyphens."""
    steps: int
    """Steps after which the profile ends by itself."""
    cpu: bool
    gpu: bool
    stacks: bool
    """Record the Python functions that called each operation."""
    shapes: bool
    """Record the shapes of inputs."""


class StopProfileReq(Message, frozen=True, kw_only=True):
    """Ends the profile; the reply's message is its file, or that of the last profile."""

    id: str


ProfileReq = StartProfileReq | StopProfileReq
