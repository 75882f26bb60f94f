"""Scripted engine for tests: a scheduler and a detokenizer simulated at the level of messages."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from tercet.protocol.membership.events import Delivery, PeerDown, PeerReady, PeerUp
from tercet.protocol.messages.audio import Transcript, TranscriptTokens
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import (
    AbortReq,
    BatchStrOutput,
    ContinueGenerationReq,
    ControlReply,
    DecodeSpec,
    ExclusiveReady,
    FirstTextRow,
    FlushCacheReq,
    GetInternalStateReq,
    InternalState,
    LoadLoRAAdapterReq,
    Message,
    MetricsReq,
    PauseGenerationReq,
    Ready,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    Series,
    TokenizedGenerateReqInput,
    TokenizerFiles,
    TokenizerFilesReq,
    UnloadLoRAAdapterReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.profiles import StartProfileReq, StopProfileReq
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Logprobs,
    ModelIdentity,
    ModelLimits,
    PrefillChunk,
    Resume,
    Role,
    pack_floats,
    pack_ints,
    unpack_ints,
)
from tercet.protocol.messages.weight_transfers import GetWeightsByNameReq, WeightTransferReq

DETOKENIZER = "detokenizer-0"


@dataclass(frozen=True)
class Token:
    """Token of one step: an id, and the text that the detokenizer sends with it."""

    id: int
    text: str
    finish: FinishReason | None = None
    logprob: float = -0.5
    top: tuple[tuple[int, float], ...] = ()


def _nowhere(deliveries: list[Delivery]) -> None:
    """Drop deliveries until a frontend is connected."""


def _accept(request: TokenizedGenerateReqInput) -> Message | None:  # noqa: ARG001
    return None


def _digest(peer: str, path: str) -> str:  # noqa: ARG001
    """Return the same digest at every peer."""
    return hashlib.sha256(path.encode()).hexdigest()


Script = Callable[[TokenizedGenerateReqInput, int], Sequence[Token]]
"""Function that returns the tokens of a choice from position 0 on."""


@dataclass
class Running:
    """A choice that the engine runs."""

    request: TokenizedGenerateReqInput
    scheduler: str
    index: int
    tokens: Sequence[Token]
    position: int
    opened: bool = False


@dataclass
class FakeEngine:
    """Test double of a frontend's node and of every peer behind it.

    Call `connect` once a loop runs. With `auto`, one step of every choice runs whenever the loop is idle; otherwise
    `step` runs one. `deliver` is the frontend's `on_deliveries`.
    """

    script: Script
    files: dict[str, bytes]
    limits: ModelLimits
    weights: str = "weights-1"
    auto: bool = True
    schedulers: list[str] = field(default_factory=lambda: ["scheduler-0"])
    deliver: Callable[[list[Delivery]], None] = _nowhere
    sent: list[tuple[str, Message]] = field(default_factory=list)
    frames: list[tuple[Frame, ...]] = field(default_factory=list)
    """Raw frames of the messages that had any."""
    running: list[Running] = field(default_factory=list)
    reject: Callable[[TokenizedGenerateReqInput], Message | None] = _accept
    full: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    """Peers that do not answer orders and queries."""
    other_frontends: dict[str, Series] = field(default_factory=dict)
    """Metrics of other frontends at the same socket, by peer id."""
    adapter: Callable[[str, str], str] = _digest
    """Function that returns the SHA-256 of the files at a path, or raises ValueError with the reason to refuse them."""
    state: InternalState | None = None
    """Internal state that schedulers report; None for schedulers that cannot decode the request for it."""
    waited: float | None = 0.02
    """Queue time that schedulers report per choice; None if they report none."""
    held: list[tuple[str, TokenizedGenerateReqInput]] = field(default_factory=list)
    """Requests that wait for `offer`, with their schedulers."""
    _scheduled: bool = False

    # The frontend's node.

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Handle a message of the frontend; the reply is sent from the loop, never at once."""
        if peer in self.full or peer not in {*self.schedulers, *self.other_frontends}:
            return False
        if isinstance(message, GetInternalStateReq) and self.state is None:
            return False
        self.sent.append((peer, message))
        if frames:
            self.frames.append(frames)
        match message:
            case TokenizerFilesReq():
                asyncio.get_running_loop().call_soon(self._send_files, peer, message.id)
            case AbortReq():
                self._abort(peer, message)
            case TokenizedGenerateReqInput():
                self._generate(peer, message)
            case (
                StartProfileReq()
                | StopProfileReq()
                | FlushCacheReq()
                | PauseGenerationReq()
                | ContinueGenerationReq()
                | ReleaseMemoryReq()
                | ResumeMemoryReq()
                | UnloadLoRAAdapterReq()
            ):
                self._answer(peer, ControlReply(id=message.id, ok=True))
            case LoadLoRAAdapterReq():
                self._answer(peer, self._read(peer, message))
            case UpdateWeightsFromDiskReq():
                self._update(peer, message)
            case _ if isinstance(message, WeightTransferReq):
                self._transfer(peer, message)
            case GetInternalStateReq():
                assert self.state is not None
                self._answer(peer, msgspec.structs.replace(self.state, id=message.id))
            case MetricsReq():
                self._answer(peer, msgspec.structs.replace(self.other_frontends[peer], id=message.id))
        return True

    def connect(self) -> None:
        """Make every peer ready."""
        for peer in self.schedulers:
            self.scheduler_up(peer)
        self.detokenizer_up(DETOKENIZER)

    def scheduler_up(self, peer: str, incarnation: str = "1") -> None:
        """Make one scheduler ready."""
        if peer not in self.schedulers:
            self.schedulers.append(peer)
        ready = Ready(limits=self.limits, identity=ModelIdentity(weights=self.weights))
        self._from(peer, PeerUp(peer, Role.SCHEDULER, incarnation))
        self._from(peer, PeerReady(peer, Role.SCHEDULER, ready))

    def _update(self, peer: str, order: UpdateWeightsFromDiskReq) -> None:
        """Answer an update of weights, then report the new weights with the next turn of the loop."""
        try:
            weights = self.adapter(peer, order.path)
        except ValueError as error:
            self._answer(peer, ControlReply(id=order.id, ok=False, message=str(error)))
            return
        ready = Ready(limits=self.limits, identity=ModelIdentity(weights=weights, weights_path=order.path))
        self._answer(peer, ControlReply(id=order.id, ok=True))
        if peer not in self.silent:
            asyncio.get_running_loop().call_soon(self._from, peer, PeerReady(peer, Role.SCHEDULER, ready))

    def _transfer(self, peer: str, order: WeightTransferReq) -> None:
        """Update the weights with the last part, and answer everything else."""
        if getattr(order, "last", False):
            parts = sum(map(len, self.frames))
            self._update(peer, UpdateWeightsFromDiskReq(id=order.id, path=f"/staged/{parts}"))
            return
        message = "[1.0, 2.0]" if isinstance(order, GetWeightsByNameReq) else ""
        self._answer(peer, ControlReply(id=order.id, ok=True, message=message))

    def detokenizer_up(self, peer: str, incarnation: str = "1") -> None:
        """Make one detokenizer ready."""
        self._from(peer, PeerUp(peer, Role.DETOKENIZER, incarnation))
        self._from(peer, PeerReady(peer, Role.DETOKENIZER, Ready()))

    def down(self, peer: str, role: Role = Role.SCHEDULER) -> None:
        """Let a peer die with everything it ran or held."""
        if role is Role.SCHEDULER:
            self.schedulers.remove(peer)
            self.running = [each for each in self.running if each.scheduler != peer]
            self.held = [each for each in self.held if each[0] != peer]
        else:
            self.running = [each for each in self.running if each.request.detokenizer != peer]
        self._from(peer, PeerDown(peer, role, "killed"))

    def requests(self) -> list[TokenizedGenerateReqInput]:
        """Return every dispatch so far."""
        return [message for _, message in self.sent if isinstance(message, TokenizedGenerateReqInput)]

    def aborts(self) -> list[AbortReq]:
        """Return every abort so far."""
        return [message for _, message in self.sent if isinstance(message, AbortReq)]

    def offer(self) -> None:
        """Send ExclusiveReady to the held requests; the test must make sure that nothing else runs."""
        held, self.held = self.held, []
        for peer, request in held:
            self._from(peer, ExclusiveReady(rid=request.rid, attempt=request.attempt))

    def step(self, *, lost: bool = False) -> None:
        """Send one token of every running choice in one message, which may be lost."""
        self.offer()
        rows = [(each, self._advance(each)) for each in self.running]
        self.running = [each for each, (_, finish) in rows if finish is None]
        batch = self._batch(rows)
        if rows and not lost:
            self._from(DETOKENIZER, batch)

    def end_as_asked(self, rid: str) -> None:
        """Finish a request as if another frontend had been asked to abort it."""
        mine = [each for each in self.running if each.request.rid == rid]
        self.running = [each for each in self.running if each.request.rid != rid]
        asked = FinishReason(FinishType.ABORT, message="aborted by request", user_requested=True)
        self._from(DETOKENIZER, self._batch([(each, ([], asked)) for each in mine]))

    # Internals.

    def _from(self, peer: str, message: Message | PeerUp | PeerReady | PeerDown, *frames: memoryview) -> None:
        self.deliver([Delivery(peer, message, frames)])

    def _send_files(self, peer: str, request_id: str) -> None:
        sums = [hashlib.sha256(content).hexdigest() for content in self.files.values()]
        reply = TokenizerFiles(id=request_id, model=self.limits.model, names=list(self.files), sha256=sums)
        self._from(peer, reply, *(memoryview(content) for content in self.files.values()))

    def _answer(self, peer: str, reply: ControlReply | Series | InternalState) -> None:
        if peer not in self.silent:
            asyncio.get_running_loop().call_soon(self._from, peer, reply)

    def _read(self, peer: str, order: LoadLoRAAdapterReq) -> ControlReply:
        try:
            return ControlReply(id=order.id, ok=True, sha256=self.adapter(peer, order.adapter.path))
        except ValueError as error:
            return ControlReply(id=order.id, ok=False, message=str(error))

    def _abort(self, peer: str, message: AbortReq) -> None:
        self.running = [
            each
            for each in self.running
            if (each.scheduler, each.request.rid) != (peer, message.rid)
            or (message.indices and each.index not in message.indices)
        ]

    def _generate(self, peer: str, request: TokenizedGenerateReqInput) -> None:
        if rejected := self.reject(request):
            asyncio.get_running_loop().call_soon(self._from, peer, rejected)
            return
        self.running = [each for each in self.running if (each.scheduler, each.request.rid) != (peer, request.rid)]
        if request.deferred:
            self.held.append((peer, request))
            self._schedule()
            return
        for resume in request.resume or [Resume(index) for index in range(request.sampling.n)]:
            position = len(unpack_ints(resume.output_ids))
            tokens = self.script(request, resume.index)
            self.running.append(Running(request, peer, resume.index, tokens, position))
        self._schedule()

    def _schedule(self) -> None:
        if self.auto and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(0.001, self._auto_step)

    def _auto_step(self) -> None:
        self._scheduled = False
        self.step()
        if self.running:
            self._schedule()

    def _advance(self, choice: Running) -> tuple[list[Token], FinishReason | None]:
        """Return the next token, with a finish reason where the script or the maximum length ends."""
        limit = choice.request.sampling.max_new_tokens
        if choice.position >= min(limit, len(choice.tokens)):
            return [], FinishReason(FinishType.LENGTH if choice.position >= limit else FinishType.STOP)
        token = choice.tokens[choice.position]
        choice.position += 1
        if token.finish:
            return [token], token.finish
        if choice.position >= limit:
            return [token], FinishReason(FinishType.LENGTH)
        if choice.position >= len(choice.tokens):
            return [token], FinishReason(FinishType.STOP, 0)
        return [token], None

    def _batch(self, rows: list[tuple[Running, tuple[list[Token], FinishReason | None]]]) -> BatchStrOutput:
        offsets = [0]
        for _, (tokens, _) in rows:
            offsets.append(offsets[-1] + len(tokens))
        openings = [
            _opening(row, each.request, self.waited, self.limits)
            for row, (each, _) in enumerate(rows)
            if not each.opened
        ]
        for each, _ in rows:
            each.opened = True
        return BatchStrOutput(
            rids=[each.request.rid for each, _ in rows],
            indices=pack_ints(each.index for each, _ in rows),
            attempts=pack_ints(each.request.attempt for each, _ in rows),
            positions=pack_ints(each.position - len(tokens) for each, (tokens, _) in rows),
            offsets=pack_ints(offsets),
            token_ids=pack_ints(token.id for _, (tokens, _) in rows for token in tokens),
            texts=["".join(token.text for token in tokens) for _, (tokens, _) in rows],
            openings=openings,
            finishes={row: finish for row, (_, (_, finish)) in enumerate(rows) if finish},
            logprobs={
                row: _logprobs(tokens, each.request.logprobs.top)
                for row, (each, (tokens, _)) in enumerate(rows)
                if each.request.logprobs
            },
        )


def decode_spec(request: TokenizedGenerateReqInput) -> DecodeSpec:
    """Return the DecodeSpec that a request carries for the detokenizer."""
    return msgspec.msgpack.decode(request.decode_spec, type=DecodeSpec)


def _opening(row: int, request: TokenizedGenerateReqInput, waited: float | None, limits: ModelLimits) -> FirstTextRow:
    prompt = unpack_ints(request.input_ids)
    scores = None
    if request.logprobs and request.logprobs.prompt:
        top = request.logprobs.top
        likeliest = [Token(token_id, "", logprob=-1.0 - place) for place, token_id in enumerate(prompt[1:])]
        scores = _logprobs([Token(prompt[0], "", logprob=math.nan), *likeliest], top)
        if request.audio is not None and limits.audio is not None and request.audio.transcript is Transcript.TIMES:
            scores = msgspec.structs.replace(scores, times=_times(prompt, limits.audio.tokens))
    cached = len(prompt) // 2
    queued = waited or 0.0
    halves = [PrefillChunk(at=queued, tokens=1), PrefillChunk(at=queued + 0.001, tokens=len(prompt) - 1)]
    return FirstTextRow(
        row=row,
        prompt_tokens=len(prompt),
        cached_tokens=cached,
        prompt_logprobs=scores,
        queue_time=waited,
        chunks=halves if request.traced else [],
    )


def _times(prompt: Sequence[int], tokens: TranscriptTokens) -> bytes:
    """Return times of a text: each token has a tenth of a second."""
    named = {tokens.start, tokens.transcribe, tokens.translate, tokens.no_timestamps, *tokens.languages.values()}
    return pack_floats((place + 1) / 10 for place, _ in enumerate(token for token in prompt if token not in named))


def _logprobs(tokens: list[Token], top: int) -> Logprobs:
    """`top` alternatives beside each token: the script's, then the token itself."""
    ids: list[int] = []
    values: list[float] = []
    for token in tokens:
        alternatives = [*token.top, (token.id, token.logprob)]
        alternatives += [(0, -20.0)] * top
        ids += [token_id for token_id, _ in alternatives[:top]]
        values += [value for _, value in alternatives[:top]]
    return Logprobs(pack_floats(token.logprob for token in tokens), top, pack_ints(ids), pack_floats(values))
