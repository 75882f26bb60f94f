"""A choice of a request, from arrival to its final answer."""

from collections.abc import Sequence
from hashlib import sha256

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, Logprobs, PrefillChunk, unpack_array
from tercet.scheduler.core.cache.prefix_cache import Node, PageLists, PrefixCache
from tercet.scheduler.core.images import ALL_TOKENS, PromptImages
from tercet.scheduler.core.speculation.draft_policy import DraftPolicy


def namespace_of(request: TokenizedGenerateReqInput) -> str:
    """Return the namespace of the cached prefixes that a request can share: one tenant, adapter and encoder's input."""
    audio = f"{request.audio.sha256.hex()}/" if request.audio else ""
    text = f"{sha256(request.encoder_ids).hexdigest()}/" if request.encoder_ids else ""
    return f"{audio}{text}{request.lora.sha256 if request.lora else ''}/{request.cache_salt}"


class Req:
    """A choice. It waits, holds a slot, pages and places while it runs, and may be retracted to wait again.

    Token counts, all from the start of the prompt: `len(tokens)` are known, `length` adds those being sampled in
    flight, `computed` have their keys and values planned, and at `end` the choice has the maximum number of tokens.
    """

    __slots__ = (
        *("adapter", "adapter_slot", "alone", "arrival", "arrived", "attempt", "audio", "audio_place"),
        *("awaiting_result", "cached", "charged", "chunks", "computed", "constrained", "decode_spec"),
        *("detokenizer", "drafting", "end", "fast_path", "finish", "followers", "frontend", "hold", "images"),
        *("in_flight", "index", "last_step", "late", "leader", "length", "logprobs", "measured", "measured_at"),
        *("node", "offered", "opened", "pages", "priority", "prompt_logprobs", "prompt_tokens", "published"),
        *("readable", "request", "resumed", "rid", "room", "salt", "sampling", "scored", "sent", "shared", "slot"),
        *("stop_ids", "tenant", "text", "text_place", "times_skipped", "token_logprobs", "tokens", "traced"),
        *("waited", "yielded"),
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
        """Create a choice. `number` is equal for choices of one request; by default it is the arrival number."""
        self.rid = request.rid
        self.index = index
        self.arrival = arrival
        self.request = arrival if number < 0 else number
        self.arrived = arrived
        self.tokens = unpack_array(request.input_ids)
        self.prompt_tokens = len(self.tokens)
        self.tokens.extend(output_ids)
        self.images: PromptImages | None = None
        """If set, `tokens` has keys of images in the place of placeholder tokens."""
        self.sampling = request.sampling
        self.drafting = DraftPolicy(bytes(request.prediction))
        self.constrained = request.sampling.grammar is not None
        self.logprobs = request.logprobs
        self.priority = request.priority
        self.tenant = request.tenant
        self.adapter, self.audio, self.text = request.lora, request.audio, bytes(request.encoder_ids)
        self.salt = namespace_of(request)
        self.resumed = bool(request.resume)
        """The choice continues an earlier attempt, and goes before new choices."""
        self.end = 0
        self.stop_ids: frozenset[int] = frozenset()
        self.finish: FinishReason | None = None
        self.prompt_logprobs: list[Logprobs] = []
        """Log-probabilities of runs of prompt tokens, from the second token on."""
        self.token_logprobs: list[Logprobs] = []
        """Log-probabilities of the last output tokens, one each, if requested; kept for a later attempt."""
        self.scored = False
        """`prompt_logprobs` is complete."""
        self.times_skipped = 0
        """Number of steps in which a later arrival was admitted before it, or before the leader it followed then."""
        self.cached = -1
        self.waited: float | None = None
        """Seconds from `arrived` until a plan first included it; None before."""
        self.yielded = 0
        """Number of its tokens when it last gave its pages to another tenant."""
        self.chunks: list[PrefillChunk] = []
        """Steps of the prompt so far, if the request is traced."""
        self.charged = -1
        """Tokens that its tenant was charged for, or that it arrived with; -1 before it runs. Set by the policy."""
        self.followers: list[Req] = []
        """Choices of the same request that wait for this one to compute the prompt."""
        self.leader: Req | None = None
        """Choice whose prompt pages this one can share when it is admitted."""
        self.frontend = frontend
        self.offered = False
        """Its frontend was offered exclusive use of the scheduler, so no other choice may start before it."""
        self.route(request, len(output_ids))
        self.reset_kv()

    def route(self, request: TokenizedGenerateReqInput, sent: int) -> None:
        """Use the route of this or a later attempt; its receiver knows `sent` output tokens."""
        self.attempt = request.attempt
        self.traced = request.traced
        self.alone = request.exclusive
        self.hold = request.deferred
        self.offered = self.offered and not request.deferred
        self.detokenizer = request.detokenizer
        self.decode_spec = request.decode_spec
        self.sent = sent
        self.opened = False
        self.fast_path = False
        """A next token that ends nothing needs only a token in its row: a step has shown it so."""

    def reset_kv(self) -> None:
        """Reset slot, pages and computed tokens."""
        self.slot = -1
        self.adapter_slot = self.audio_place = self.text_place = -1
        self.pages: PageLists = []
        self.node: Node | None = None
        self.shared = 0
        self.room = 0
        self.computed = 0
        self.length = len(self.tokens)
        self.in_flight = 0
        self.awaiting_result = False
        """The result in flight must be known before more is planned, because it may have more than one token."""
        self.last_step = -1
        self.late = -1
        """Step in which its grammar's mask was late; not planned before the mask is there. -1 for none."""
        self.published = False
        self.fast_path = False
        self.readable = ALL_TOKENS
        """Tokens up to the next image, audio clip or text that is not encoded yet."""
        self.measured = 0
        self.measured_at = -1
        if not self.scored:
            self.prompt_logprobs = []

    def sit_out(self, step: int) -> None:
        """Compute the last known token again, once the mask that was late in `step` is there: nothing was sampled."""
        self.late = step
        self.length = len(self.tokens)
        self.computed = self.length - 1
        self.fast_path = False

    @property
    def output_tokens(self) -> int:
        """Number of known output tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def to_score(self) -> bool:
        """Return whether every prompt position must be computed for its log-probability."""
        return self.logprobs is not None and self.logprobs.prompt and not self.scored

    @property
    def reusable(self) -> int:
        """Number of known tokens whose cached pages it can use: never the last one."""
        return 0 if self.to_score else len(self.tokens) - 1

    @property
    def has_work(self) -> bool:
        """Return whether a plan could compute a token for it now."""
        if self.finish is not None or self.computed >= self.length or self.blocked_on_result or self.late >= 0:
            return False
        return self.length < self.end or not self.prefilled

    @property
    def blocked_on_result(self) -> bool:
        """Return whether the token being sampled must be known before more can be planned for it."""
        return (self.constrained or self.awaiting_result) and self.length > len(self.tokens) and self.finish is None

    @property
    def prefilled(self) -> bool:
        """Return whether every prompt token is planned."""
        return self.computed >= self.prompt_tokens

    def cached_pages(self, cache: PrefixCache) -> int:
        """Return the number of pages of a waiting choice in `cache`; measured again only after a change."""
        if self.measured_at != cache.version:
            self.measured = cache.measure(self.salt, self.cache_key(self.reusable))
            self.measured_at = cache.version
        return self.measured

    def cache_key(self, tokens: int) -> bytes:
        """Return the first `tokens` ids as a key of the prefix cache."""
        with memoryview(self.tokens) as known:  # copies once; tokens cannot grow while a view of them exists
            return known[:tokens].tobytes()

    def ids(self) -> bytes:
        """Return all known ids."""
        return (self.tokens if self.images is None else self.images.with_ids(self.tokens)).tobytes()


def finish_after(req: Req, token: int, *, complete: bool = False) -> FinishReason | None:
    """Return why the choice ends with `token`, already appended, or None. `complete`: its grammar ends there."""
    if token in req.stop_ids and req.output_tokens >= req.sampling.min_new_tokens:
        return FinishReason(FinishType.STOP, token)
    if complete:
        return FinishReason(FinishType.STOP)
    if len(req.tokens) >= req.end:
        return FinishReason(FinishType.LENGTH)
    return None


def finish_at_arrival(req: Req) -> FinishReason | None:
    """Return the finish that a resumed choice had reached before its final answer was lost, or None."""
    return finish_after(req, req.tokens[-1]) if req.output_tokens else None
