"""An input, from arrival to its vector."""

from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput


class EmbeddingReq:
    """An input. It waits until a plan names it, and is removed once that plan is committed."""

    __slots__ = (
        "alone",
        "arrival",
        "arrived",
        "attempt",
        "frontend",
        "hold",
        "input_ids",
        "offered",
        "priority",
        "rid",
        "tenant",
        "times_skipped",
        "token_types",
        "tokens",
        "waited",
    )

    def __init__(self, request: TokenizedEmbeddingReqInput, frontend: str, arrival: int, arrived: float = 0.0) -> None:
        self.rid = request.rid
        self.frontend = frontend
        self.arrival = arrival
        self.arrived = arrived
        self.waited = float("nan")
        """Seconds from `arrived` until a plan included it; NaN before."""
        self.input_ids = request.input_ids
        self.token_types = request.token_types
        self.tokens = len(request.input_ids) // 4
        self.priority = request.priority
        self.tenant = request.tenant
        self.times_skipped = 0
        self.offered = False
        """Its frontend was offered exclusive use of the scheduler, so no other input may start before it."""
        self.route(request)

    def route(self, request: TokenizedEmbeddingReqInput) -> None:
        """Use the route of this or a later attempt."""
        self.attempt = request.attempt
        self.alone = request.exclusive
        self.hold = request.deferred
        self.offered = self.offered and not request.deferred

    def is_of(self, request: TokenizedEmbeddingReqInput) -> bool:
        """Return whether a later attempt requests the same vector."""
        return self.input_ids == request.input_ids and self.token_types == request.token_types
