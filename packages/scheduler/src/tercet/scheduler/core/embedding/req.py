"""An input, from arrival to its vector or its embeddings."""

from tercet.protocol.messages.encodings import EncodeMediaReq
from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput

Input = TokenizedEmbeddingReqInput | EncodeMediaReq


class EmbeddingReq:
    """An input. It waits until a plan names it, and is removed once that plan is committed.

    Attempts with equal `content` request the same answer. An image or sound has its array.
    """

    __slots__ = (
        "alone",
        "array",
        "arrival",
        "arrived",
        "attempt",
        "content",
        "frontend",
        "hold",
        "offered",
        "priority",
        "request",
        "rid",
        "tenant",
        "times_skipped",
        "tokens",
        "waited",
    )

    def __init__(
        self,
        request: Input,
        content: tuple[bytes | str, ...],
        tokens: int,
        frontend: str,
        arrival: int,
        arrived: float = 0.0,
        array: memoryview = memoryview(b""),
    ) -> None:
        self.rid = request.rid
        self.frontend = frontend
        self.arrival = arrival
        self.arrived = arrived
        self.waited = float("nan")
        """Seconds from `arrived` until a plan included it; NaN before."""
        self.request = request
        self.content = content
        self.array = array
        self.tokens = tokens
        self.priority = request.priority
        self.tenant = request.tenant
        self.times_skipped = 0
        self.offered = False
        """Its frontend was offered exclusive use of the scheduler, so no other input may start before it."""
        self.route(request)

    def route(self, request: Input) -> None:
        """Use the route of this or a later attempt."""
        self.attempt = request.attempt
        self.alone = request.exclusive
        self.hold = request.deferred
        self.offered = self.offered and not request.deferred
