"""`Req`: one choice of one request, from arrival to its final answer."""

from collections.abc import Sequence

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, Logprobs, unpack_array
from tercet.scheduler.core.pages import PageLists
from tercet.scheduler.core.prefix_cache import Node, PrefixCache
from tercet.scheduler.core.speculation.draft_policy import DraftPolicy


def namespace_of(request: TokenizedGenerateReqInput) -> str:
    """Whose cached prefixes a request can share: they are of one tenant and one adapter."""
    return f"{request.lora.sha256 if request.lora else ''}/{request.cache_salt}"


class Req:
    """One choice. It waits, holds a slot, pages and its adapter while it runs, and may be retracted to wait again.

    Numbers of tokens, all counted from the start of the prompt:
    `len(tokens)` are known, `length` adds those being sampled in flight, `computed` have their keys and values planned,
    and at `end` the choice has all the tokens it may have.
    """

    __slots__ = (
        "adapter",
        "alone",
        "arrival",
        "arrived",
        "attempt",
        "cached",
        "charged",
        "computed",
        "decode_spec",
        "detokenizer",
        "drafting",
        "end",
        "finish",
        "followers",
        "frontend",
        "guided",
        "hold",
        "in_flight",
        "index",
        "last_step",
        "late",
        "leader",
        "length",
        "logprobs",
        "measured",
        "measured_at",
        "node",
        "offered",
        "opened",
        "pages",
        "passed_over",
        "place",
        "priority",
        "prompt_logprobs",
        "prompt_tokens",
        "published",
        "request",
        "resumed",
        "rid",
        "room",
        "salt",
        "sampling",
        "scored",
        "sent",
        "shared",
        "slot",
        "steady",
        "stop_ids",
        "tenant",
        "token_logprobs",
        "tokens",
        "unsure",
        "waited",
    )

    def __init__(
        self,
        request: TokenizedGenerateReqInput,
        frontend: str,
        index: int,
        output_ids: Sequence[int],
        arrival: int,
        arrived: float = 0.0,
        number: int = -1,
    ) -> None:
        """`number` is equal for choices of one request; that of its arrival by default."""
        self.rid = request.rid
        self.index = index
        self.arrival = arrival
        self.request = arrival if number < 0 else number
        self.arrived = arrived
        self.tokens = unpack_array(request.input_ids)
        self.prompt_tokens = len(self.tokens)
        self.tokens.extend(output_ids)
        self.sampling = request.sampling
        self.drafting = DraftPolicy(bytes(request.prediction))
        self.guided = request.sampling.grammar is not None
        self.logprobs = request.logprobs
        self.priority = request.priority
        self.tenant = request.tenant
        self.adapter = request.lora
        self.salt = namespace_of(request)
        self.resumed = bool(request.resume)
        """Whether it goes on with what an earlier attempt began, and so goes before new choices."""
        self.end = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.finish: FinishReason | None = None
        self.prompt_logprobs: list[Logprobs] = []
        """Of runs of prompt tokens, from the second on."""
        self.token_logprobs: list[Logprobs] = []
        """Of the last output tokens, one each, where wanted: kept so that a later attempt can be told again."""
        self.scored = False
        """Whether `prompt_logprobs` has all it will have."""
        self.passed_over = 0
        """Steps in which a later arrival was admitted before it, or before the one it followed then."""
        self.cached = -1
        self.waited: float | None = None
        """From `arrived` until a plan first had it; None before."""
        self.charged = -1
        """Tokens that its tenant was charged for, or came with; -1 before it runs. A policy keeps these books."""
        self.followers: list[Req] = []
        """Choices of the same request that wait for this one to compute the prompt."""
        self.leader: Req | None = None
        """Whose prompt pages this choice can share when it is admitted."""
        self.frontend = frontend
        self.offered = False
        """Whether nobody else may start before it: its frontend has been told so."""
        self.route(request, len(output_ids))
        self.forget_memory()

    def route(self, request: TokenizedGenerateReqInput, sent: int) -> None:
        """Take the route of this or a later attempt; `sent` output tokens are known at the other end."""
        self.attempt = request.attempt
        self.alone = request.exclusive
        self.hold = request.deferred
        self.offered = self.offered and not request.deferred
        self.detokenizer = request.detokenizer
        self.decode_spec = request.decode_spec
        self.sent = sent
        self.opened = False
        self.steady = False
        """Whether a next token, if it ends nothing, is all that there is to say of it: a step has shown it so."""

    def forget_memory(self) -> None:
        """Hold no slot, no page and no computed token."""
        self.slot = -1
        self.place = -1
        self.pages: PageLists = []
        self.node: Node | None = None
        self.shared = 0
        self.room = 0
        self.computed = 0
        self.length = len(self.tokens)
        self.in_flight = 0
        self.unsure = False
        """Whether what is in flight must be known before more is planned, since more than one token may come of it."""
        self.last_step = -1
        self.late = -1
        """The step in which its grammar's mask was late: nothing is planned before the mask is there. -1 for none."""
        self.published = False
        self.steady = False
        self.measured = 0
        self.measured_at = -1
        if not self.scored:
            self.prompt_logprobs = []

    def sit_out(self, step: int) -> None:
        """Compute the last known token again, once the mask that was late in `step` is there: nothing was sampled."""
        self.late = step
        self.length = len(self.tokens)
        self.computed = self.length - 1
        self.steady = False

    @property
    def output_tokens(self) -> int:
        """Output tokens known."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def to_score(self) -> bool:
        """Whether every prompt position must be computed for its log-probability."""
        return self.logprobs is not None and self.logprobs.prompt and not self.scored

    @property
    def reusable(self) -> int:
        """Tokens of those known that it need not compute itself if somebody else has: never the last one."""
        return 0 if self.to_score else len(self.tokens) - 1

    @property
    def has_work(self) -> bool:
        """Whether a plan could compute something for it now."""
        if self.finish is not None or self.computed >= self.length or self.awaits_result or self.late >= 0:
            return False
        return self.length < self.end or not self.prefilled

    @property
    def awaits_result(self) -> bool:
        """Whether the token being sampled must be known before anything more can be planned for it."""
        return (self.guided or self.unsure) and self.length > len(self.tokens) and self.finish is None

    @property
    def prefilled(self) -> bool:
        """Whether every prompt token is planned."""
        return self.computed >= self.prompt_tokens

    def cached_pages(self, cache: PrefixCache) -> int:
        """Pages of a waiting choice that `cache` has; it is asked again only once it has changed."""
        if self.measured_at != cache.version:
            self.measured = cache.measure(self.salt, self.cache_key(self.reusable))
            self.measured_at = cache.version
        return self.measured

    def cache_key(self, tokens: int) -> bytes:
        """The first `tokens` ids as the prefix cache wants them."""
        with memoryview(self.tokens) as known:  # copies once, and tokens cannot grow while there is a view of them
            return known[:tokens].tobytes()
