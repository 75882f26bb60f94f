"""Every message that crosses a process, and the closed union of each link.

Version rule (`messages.values.WIRE_VERSION`): a new field has a default (minor); a new message type is announced
in `Hello.features` (minor); removed or retyped is major. Structs are keyed, never positional, and always written whole,
so a changed default never changes what an older sender meant. Golden bytes of every released minor stay in the tests.

Token ids, positions and the like are flat int32 buffers (`pack_ints`), one for a whole batch: row i of a batch owns
`token_ids[offsets[i]:offsets[i + 1]]`.
"""

import msgspec

from tercet.protocol.messages.values import (
    FinishReason,
    Held,
    HistogramSample,
    Load,
    LogprobParams,
    Logprobs,
    LoRAAdapter,
    ModelIdentity,
    ModelLimits,
    Phase,
    Resume,
    Role,
    Sample,
    SamplingParams,
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message is an immutable struct, tagged with its class name."""


# Membership: every link, both ways.


class Hello(Message, frozen=True, kw_only=True):
    """Opens a link: who speaks, from where it can be reached, and what it understands."""

    peer: str
    incarnation: str
    role: Role
    address: str
    version: tuple[int, int]
    features: list[str]
    """Tags of every message type the sender can decode."""
    software: str = ""
    reply: bool = False
    """True when this answers the receiver's own Hello."""
    dialled: str = ""
    """The address it was sent to; an answer repeats that of the Hello it answers, perhaps an alias of `address`."""


class Introduce(Message, frozen=True, kw_only=True):
    """A frontend tells a scheduler or detokenizer where another peer is; the receiver says Hello to it."""

    peer: str
    role: Role
    address: str


class Ready(Message, frozen=True, kw_only=True):
    """The sender can take work. Schedulers describe their model."""

    limits: ModelLimits | None = None
    identity: ModelIdentity | None = None
    url: str = ""
    """A frontend's HTTP address, for the supervisor."""
    software: str = ""
    """Name and version of what runs the model: another may answer otherwise. Since 1.1."""


class Progress(Message, frozen=True, kw_only=True):
    """How far a part is with starting up, for the supervisor to show; `total` 0 means unknown."""

    text: str
    done: int = 0
    total: int = 0


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every interval by a thread that a busy step cannot starve. Hung is not slow: see `step_age`."""

    phase: Phase
    steps: int = 0
    step_age: float = 0.0
    """Seconds since the running step last gave a sign: since it began, or finished a part of itself."""
    longest_step: float = 0.0
    """Seconds: the longest such time that has ended with a sign."""
    step_seconds: float = 0.0
    """What the steps took that are done, all together. Since 1.1."""
    load: Load = Load()
    held: Held = Held()


class Goodbye(Message, frozen=True, kw_only=True):
    """The sender leaves on purpose; close its socket."""

    reason: str = ""


# Frontend to scheduler.


class TokenizedGenerateReqInput(Message, frozen=True, kw_only=True):
    """A request to generate, tokenized and validated. `attempt` counts dispatches of the same `rid` from 0.

    An empty `resume` means n fresh choices; otherwise exactly the listed choices are still open.
    `decode_spec` is for the detokenizer and forwarded unopened.
    """

    rid: str
    attempt: int
    detokenizer: str
    """Peer id that turns this request's tokens into text."""
    input_ids: bytes
    sampling: SamplingParams
    decode_spec: bytes
    logprobs: LogprobParams | None = None
    resume: list[Resume] = []
    priority: int = 0
    cache_salt: str = ""
    exclusive: bool = msgspec.field(default=False, name="alone")
    """Run while nothing else runs: earlier attempts may have killed a scheduler."""
    deferred: bool = msgspec.field(default=False, name="hold")
    """With `exclusive`: do not start before an attempt without it, which answers ExclusiveReady. Since 1.1."""
    lora: LoRAAdapter | None = None
    """Since 1.1: send it only to a scheduler whose `ModelLimits.max_loras` is not 0."""
    prediction: bytes = b""
    """Token ids (int32) that the sender expects as output. A scheduler may guess by them, which changes how fast the
    output comes and no token of it. Since 1.1."""
    tenant: str = ""
    """For whom it is, where a scheduler is to be shared fairly: the same for all requests of one API key, from every
    frontend, and nothing that tells the key. Since 1.1."""


class TokenizedEmbeddingReqInput(Message, frozen=True, kw_only=True):
    """One input to make one vector of. It has one choice, index 0, whose only position is 0. Since 1.1."""

    rid: str
    attempt: int
    input_ids: bytes
    token_types: bytes = b""
    """Segment of each token (int32), for encoders that read pairs; empty means all 0."""
    priority: int = 0
    exclusive: bool = msgspec.field(default=False, name="alone")
    deferred: bool = msgspec.field(default=False, name="hold")
    tenant: str = ""
    """These three are as in TokenizedGenerateReqInput."""


class AbortReq(Message, frozen=True, kw_only=True):
    """Stop choices of a request (all of them when `indices` is empty). Unknown rids are ignored.

    A detokenizer gets it for choices that it holds though they are routed elsewhere, and forgets them.
    """

    rid: str
    indices: list[int] = []
    reason: str = ""
    user_requested: bool = msgspec.field(default=False, name="asked")
    """Somebody asked for it, at whatever frontend: it names anybody's request, those of one HTTP request (`rid.N`), or
    for "" every request, and the finals say `user_requested` too. Since 1.1."""


class FlushCacheReq(Message, frozen=True, kw_only=True):
    """Forget every cached prefix that no running request uses."""

    id: str


class PauseGenerationReq(Message, frozen=True, kw_only=True):
    """Plan nothing until ContinueGenerationReq; requests are kept."""

    id: str


class ContinueGenerationReq(Message, frozen=True, kw_only=True):
    """End a pause."""

    id: str


class UpdateWeightsFromDiskReq(Message, frozen=True, kw_only=True):
    """Go on with other weights of the same model. Since 1.1.

    Requests that have tokens of the old ones come to their end first, and others wait, unless generation is paused:
    then the weights are loaded at once, and what runs goes on with them, all its keys and values computed again.

    The answer comes when they are loaded, and a Ready says what they are, or when they are refused, and then nothing
    has changed. No prefix stays cached.
    """

    id: str
    path: str
    """A directory on the scheduler's machine."""


class LoadLoRAAdapterReq(Message, frozen=True, kw_only=True):
    """Read an adapter, so that the answer says what its files are, and its first request finds it read. Since 1.1.

    Nothing depends on it: a scheduler reads whatever adapter a request names.
    """

    id: str
    adapter: LoRAAdapter


class UnloadLoRAAdapterReq(Message, frozen=True, kw_only=True):
    """Forget an adapter that was read. Requests that have come with it are still run. Since 1.1."""

    id: str
    adapter: LoRAAdapter


class TokenizerFilesReq(Message, frozen=True, kw_only=True):
    """Asks a scheduler for the files that turn its model's text into ids and back. Answered also while weights load."""

    id: str


# Scheduler to frontend.


class Rejected(Message, frozen=True, kw_only=True):
    """The one final answer to a request the scheduler never ran. `code` is an OpenAI error code."""

    rid: str
    attempt: int
    code: str
    message: str
    retry: bool = False
    """Another scheduler, or this one later, might accept."""


class ExclusiveReady(Message, frozen=True, kw_only=True, tag="ReadyAlone"):
    """Nothing else runs here, nor will before this held request. Since 1.1.

    A death from then on is that request's: another that was only held is not to blame.
    """

    rid: str
    attempt: int


class ControlReply(Message, frozen=True, kw_only=True):
    """The answer to the control request with the same id."""

    id: str
    ok: bool
    message: str = ""
    sha256: str = ""
    """Of the files of an adapter that was read. Since 1.1."""


class TokenizerFiles(Message, frozen=True, kw_only=True):
    """The answer to TokenizerFilesReq: one raw frame for each name, in order (tokenizer, chat template, configs)."""

    id: str
    model: str
    names: list[str]
    sha256: list[str]


class BatchEmbeddingOutput(Message, frozen=True, kw_only=True):
    """Vectors of many inputs after one step, in one raw frame: little-endian float32 [rows, width]. Since 1.1."""

    rids: list[str]
    attempts: bytes
    width: int
    finishes: dict[int, FinishReason] = {}
    """Row to finish, for the rows that failed; their part of the frame is zeros."""
    queue_times: bytes = msgspec.field(default=b"", name="waited")
    """Seconds (float32) from when each input came until a step had it; NaN if none had it."""


# Scheduler to detokenizer.


class FirstRow(msgspec.Struct, frozen=True, kw_only=True):
    """What comes once for each attempt of a choice, with its first row: for the detokenizer and the frontend."""

    row: int
    frontend: str
    """Peer id the text goes to."""
    decode_spec: bytes
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: Logprobs | None = None
    queue_time: float | None = msgspec.field(default=None, name="waited")
    """Seconds from when the choice came until a step first had it; None if none has had it. Since 1.1."""


class BatchTokenIDOutput(Message, frozen=True, kw_only=True):
    """New tokens of many choices after one step: one row per choice, rows as parallel lists and buffers."""

    rids: list[str]
    indices: bytes
    attempts: bytes
    positions: bytes
    """Position of each row's first token."""
    offsets: bytes
    """[rows + 1]"""
    token_ids: bytes
    openings: list[FirstRow] = []
    finishes: dict[int, FinishReason] = {}
    """Row to finish, for the rows that end here."""
    logprobs: dict[int, Logprobs] = {}


# Detokenizer to frontend.


class FirstTextRow(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an `FirstRow` that a frontend needs."""

    row: int
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: Logprobs | None = None
    queue_time: float | None = msgspec.field(default=None, name="waited")


class BatchStrOutput(Message, frozen=True, kw_only=True):
    """New text of many choices: the rows of BatchTokenIDOutput with what each added to its text, perhaps nothing."""

    rids: list[str]
    indices: bytes
    attempts: bytes
    positions: bytes
    offsets: bytes
    token_ids: bytes
    texts: list[str]
    openings: list[FirstTextRow] = []
    finishes: dict[int, FinishReason] = {}
    """A stop string found by the detokenizer overrides the scheduler's finish; its row ends at the completing token."""
    logprobs: dict[int, Logprobs] = {}


# Frontend to frontend: those that share a socket.


class MetricsReq(Message, frozen=True, kw_only=True, tag="SeriesReq"):
    """Asks for what a frontend counts, since whichever is asked for /metrics answers for all. Since 1.1."""

    id: str


class Series(Message, frozen=True, kw_only=True):
    """The answer to MetricsReq: what its sender has counted since it started, by the names in /metrics. Since 1.1."""

    id: str
    samples: dict[str, list[Sample]] = {}
    histograms: dict[str, list[HistogramSample]] = {}


# Unions: what each link carries, and what each inbox therefore decodes.

Membership = Hello | Introduce | Ready | Progress | Heartbeat | Goodbye
AdapterReq = LoadLoRAAdapterReq | UnloadLoRAAdapterReq
ControlReq = FlushCacheReq | PauseGenerationReq | ContinueGenerationReq | UpdateWeightsFromDiskReq | AdapterReq
FrontendToScheduler = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | AbortReq | ControlReq | TokenizerFilesReq
SchedulerToFrontend = Rejected | ExclusiveReady | ControlReply | TokenizerFiles | BatchEmbeddingOutput
SchedulerToDetokenizer = BatchTokenIDOutput | TokenizerFiles
DetokenizerToScheduler = TokenizerFilesReq
DetokenizerToFrontend = BatchStrOutput
FrontendToDetokenizer = AbortReq
FrontendToFrontend = MetricsReq | Series

SchedulerInbox = Membership | FrontendToScheduler | DetokenizerToScheduler
DetokenizerInbox = Membership | SchedulerToDetokenizer | FrontendToDetokenizer
FrontendInbox = Membership | SchedulerToFrontend | DetokenizerToFrontend | FrontendToFrontend
SupervisorInbox = Membership


# Opaque to the scheduler: written by the frontend, read by the detokenizer.


class DecodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to turn one request's tokens into text, and where an earlier attempt had got to."""

    stop: list[str] = []
    include_stop: bool = False
    """Keep the stop string in the text instead of trimming it."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_tail: bytes = b""
    """The last few prompt ids (int32), which decide how the first output token joins on."""
    resume: list[Resume] = []
    tokenizer: str = ""
    """SHA-256 of the tokenizer.json that made the ids; empty means the detokenizer's own."""
    min_tokens: int = 0
    """No stop string ends the text before so many output tokens. Since 1.1."""
    stops_in_special_tokens: bool = True
    """False where special tokens have text that only the frontend reads: no stop string is in it, nor reaches over it.
    Since 1.1."""
    chars_sent: dict[int, int] = {}
    """Characters of each resumed choice's text that the client already has."""
