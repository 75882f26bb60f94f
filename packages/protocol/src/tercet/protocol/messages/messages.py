"""Messages between processes, and the closed union of each link.

Version rule (`messages.values.WIRE_VERSION`): a new field has a default (minor); a new message type is announced in
`Hello.features` (minor); removing or retyping is major. Structs are keyed, never positional, and always written whole,
so a changed default never changes the meaning of an older message. Golden bytes of every released minor stay in the
tests.

Token ids, positions and similar numbers are flat int32 buffers (`pack_ints`), one for a whole batch: row i of a batch
owns `token_ids[offsets[i]:offsets[i + 1]]`.
"""

import msgspec

from tercet.protocol.messages.audio import AudioInput, SoundInput
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.internal_state import ChoiceRow, PrefixRow
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.values import (
    FinishReason,
    Held,
    HistogramSample,
    Load,
    LogprobParams,
    Logprobs,
    LoRAAdapter,
    MemoryTag,
    ModelIdentity,
    ModelLimits,
    Phase,
    PrefillChunk,
    Resume,
    Role,
    Sample,
    SamplingParams,
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Immutable struct, tagged with its class name or with the name it had when its tag was released."""


# Membership: every link, both directions.


class Hello(Message, frozen=True, kw_only=True):
    """Opens a link: the sender's identity, its address, and the messages it understands."""

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
    """Address this Hello was sent to; a reply repeats that of the Hello it answers, possibly an alias of `address`."""


class Introduce(Message, frozen=True, kw_only=True):
    """Address of a peer, sent by a frontend to a scheduler or detokenizer, which then sends a Hello there."""

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
    """Name and version of the inference engine; another engine may give other answers. Since 1.1."""
    encoder: EmbeddingForm | None = None
    """Form of what a scheduler encodes that takes EncodeMediaReq and no text, and so has no limits. Since 1.1."""


class Progress(Message, frozen=True, kw_only=True):
    """Startup progress, for the supervisor to display; `total` 0 means unknown."""

    text: str
    done: int = 0
    total: int = 0


class Heartbeat(Message, frozen=True, kw_only=True):
    """Periodic sign of life, sent by a thread that a busy step cannot starve. `step_age` shows a hung step."""

    phase: Phase
    steps: int = 0
    step_age: float = 0.0
    """Seconds since the running step began or last reported progress."""
    longest_step: float = 0.0
    """Longest such time of the steps so far, in seconds."""
    step_seconds: float = 0.0
    """Total duration of the finished steps, in seconds. Since 1.1."""
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
    """Wait until an attempt without this flag arrives; the scheduler answers ExclusiveReady when it could run
    `exclusive`. Since 1.1."""
    lora: LoRAAdapter | None = None
    """Since 1.1: send it only to a scheduler whose `ModelLimits.max_loras` is not 0."""
    prediction: bytes = b""
    """Token ids (int32) that the sender expects as output, as draft tokens: they change the speed and never the
    output. Since 1.1."""
    tenant: str = ""
    """Hash of the API key, equal at every frontend: schedulers share their capacity fairly among tenants. Since 1.1."""
    traced: bool = False
    """Report the steps of the prompt in `FirstRow.chunks`. Since 1.1."""
    images: list[ImageInput] = []
    """One raw frame for each, in order of the prompt; only to a scheduler with `ModelLimits.images`. Since 1.1."""
    audio: AudioInput | None = None
    """One raw frame; only to a scheduler with `ModelLimits.audio`. Since 1.1."""
    sounds: list[SoundInput] = []
    """One raw frame for each; only to a scheduler with `ModelLimits.sounds`. Since 1.1."""
    embedded: bool = False
    """The frames are embeddings, as a scheduler with `ModelLimits.embeddings` takes them alone. Since 1.1."""
    encoder_ids: bytes = b""
    """The prompt (int32), for a scheduler with `ModelLimits.encoder`; `input_ids` are then the decoder's. Since 1.1."""


class TokenizedEmbeddingReqInput(Message, frozen=True, kw_only=True):
    """Input of an embedding model. Its only choice has index 0, whose only position is 0. Since 1.1."""

    rid: str
    attempt: int
    input_ids: bytes
    token_types: bytes = b""
    """Segment of each token (int32), for encoders that read pairs; empty means all 0."""
    priority: int = 0
    exclusive: bool = msgspec.field(default=False, name="alone")
    deferred: bool = msgspec.field(default=False, name="hold")
    tenant: str = ""
    """`exclusive`, `deferred` and `tenant` are as in TokenizedGenerateReqInput."""


class AbortReq(Message, frozen=True, kw_only=True):
    """Stops choices of a request (all of them when `indices` is empty). Unknown rids are ignored.

    A detokenizer gets it for choices that it holds although they are routed elsewhere, and drops them.
    """

    rid: str
    indices: list[int] = []
    reason: str = ""
    user_requested: bool = msgspec.field(default=False, name="asked")
    """A client asked for the abort, at any frontend. The rid may then be another frontend's, the common prefix of
    one HTTP request (`rid.N`), or "" for every request, and the final rows are marked `user_requested`, too. Since
    1.1."""


class FlushCacheReq(Message, frozen=True, kw_only=True):
    """Drops every cached prefix that no running request uses."""

    id: str


class PauseGenerationReq(Message, frozen=True, kw_only=True):
    """Pauses planning until ContinueGenerationReq; requests are kept."""

    id: str


class ContinueGenerationReq(Message, frozen=True, kw_only=True):
    """Ends a pause."""

    id: str


class UpdateWeightsFromDiskReq(Message, frozen=True, kw_only=True):
    """Replaces the weights by others of the same model. Since 1.1.

    Requests with tokens of the old weights finish first, and others wait. During a pause the weights are loaded at
    once, and running requests continue with them, with all keys and values computed again.

    The reply is sent when the weights are loaded and a Ready has announced them, or when they are refused, and then
    nothing has changed. No prefix stays cached.
    """

    id: str
    path: str
    """A directory on the scheduler's machine."""


class ReleaseMemoryReq(Message, frozen=True, kw_only=True):
    """Gives memory back to the system once the steps in flight have ended. Since 1.1.

    Requests are kept, and wait until all memory is there again. No prefix stays cached. A restart ends the release.
    """

    id: str
    tags: list[MemoryTag]


class ResumeMemoryReq(Message, frozen=True, kw_only=True):
    """Allocates memory again, and loads the weights from their directory. Since 1.1.

    The reply is sent when the memory is allocated. If that fails, the reply has the reason and nothing changes.
    """

    id: str
    tags: list[MemoryTag]


class LoadLoRAAdapterReq(Message, frozen=True, kw_only=True):
    """Loads an adapter in advance; the reply has the hash of its files. Since 1.1.

    The message is optional: a scheduler loads any adapter that a request names.
    """

    id: str
    adapter: LoRAAdapter


class UnloadLoRAAdapterReq(Message, frozen=True, kw_only=True):
    """Unloads an adapter. Requests that named it before still run with it. Since 1.1."""

    id: str
    adapter: LoRAAdapter


class TokenizerFilesReq(Message, frozen=True, kw_only=True):
    """Asks a scheduler for its model's tokenizer and templates. Answered also while weights load."""

    id: str


class GetInternalStateReq(Message, frozen=True, kw_only=True):
    """Asks a scheduler for its requests and cached prefixes. Since 1.1."""

    id: str


# Scheduler to frontend.


class Rejected(Message, frozen=True, kw_only=True):
    """Final answer to a request that the scheduler never ran. `code` is an OpenAI error code."""

    rid: str
    attempt: int
    code: str
    message: str
    retry: bool = False
    """Another scheduler, or this one later, might accept the request."""


class ExclusiveReady(Message, frozen=True, kw_only=True, tag="ReadyAlone"):
    """Offer to run a deferred request: nothing else runs here, nor will before it. Since 1.1.

    If the scheduler dies from then on, that request is to blame; other deferred requests are not.
    """

    rid: str
    attempt: int


class ControlReply(Message, frozen=True, kw_only=True):
    """Reply to the control request with the same id."""

    id: str
    ok: bool
    message: str = ""
    sha256: str = ""
    """Hash of the files of an adapter that was loaded. Since 1.1."""


class TokenizerFiles(Message, frozen=True, kw_only=True):
    """Reply to TokenizerFilesReq: one raw frame for each name, in order (tokenizer, chat template, configs)."""

    id: str
    model: str
    names: list[str]
    sha256: list[str]


class InternalState(Message, frozen=True, kw_only=True):
    """Reply to GetInternalStateReq; the lists are bounded and may be incomplete. Since 1.1."""

    id: str
    load: Load
    choices: list[ChoiceRow] = []
    """Running choices first, then waiting ones."""
    prefixes: list[PrefixRow] = []
    """Largest nodes of the prefix cache, parents first."""


class BatchEmbeddingOutput(Message, frozen=True, kw_only=True):
    """Vectors of many inputs after one step, in one raw frame: little-endian float32 [rows, width]. Since 1.1."""

    rids: list[str]
    attempts: bytes
    width: int
    finishes: dict[int, FinishReason] = {}
    """Row to finish, for the rows that failed; their part of the frame is zeros."""
    queue_times: bytes = msgspec.field(default=b"", name="waited")
    """Seconds (float32) from each input's arrival to its step; NaN for an input that no step had."""


# Scheduler to detokenizer.


class FirstRow(msgspec.Struct, frozen=True, kw_only=True):
    """Data sent once per attempt of a choice, with its first row: for the detokenizer and the frontend."""

    row: int
    frontend: str
    """Peer id of the frontend that gets the text."""
    decode_spec: bytes
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: Logprobs | None = None
    queue_time: float | None = msgspec.field(default=None, name="waited")
    """Seconds from the choice's arrival to its first step; None if no step had it. Since 1.1."""
    chunks: list[PrefillChunk] = []
    """Steps of the prompt, if the request is traced. Since 1.1."""


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
    """Part of a `FirstRow` that a frontend needs."""

    row: int
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: Logprobs | None = None
    queue_time: float | None = msgspec.field(default=None, name="waited")
    chunks: list[PrefillChunk] = []
    detokenize_seconds: float = 0.0
    """Seconds that the detokenizer took for the batch, if there are chunks. Since 1.1."""


class BatchStrOutput(Message, frozen=True, kw_only=True):
    """New text of many choices: the rows of a BatchTokenIDOutput with their text, which may be empty."""

    rids: list[str]
    indices: bytes
    attempts: bytes
    positions: bytes
    offsets: bytes
    token_ids: bytes
    texts: list[str]
    openings: list[FirstTextRow] = []
    finishes: dict[int, FinishReason] = {}
    """Row to finish. A stop string found by the detokenizer overrides the scheduler's finish; its row ends at the
    token that completed the string."""
    logprobs: dict[int, Logprobs] = {}


# Frontend to frontend, for frontends that share a listening socket.


class MetricsReq(Message, frozen=True, kw_only=True, tag="SeriesReq"):
    """Asks for a frontend's metrics, since any frontend that is scraped answers for all of them. Since 1.1."""

    id: str


class Series(Message, frozen=True, kw_only=True):
    """Reply to MetricsReq: the sender's metrics since its start, by their names in /metrics. Since 1.1."""

    id: str
    samples: dict[str, list[Sample]] = {}
    histograms: dict[str, list[HistogramSample]] = {}


# Unions: messages of each link, and messages that each inbox decodes.

Membership = Hello | Introduce | Ready | Progress | Heartbeat | Goodbye
AdapterReq = LoadLoRAAdapterReq | UnloadLoRAAdapterReq
MemoryReq = ReleaseMemoryReq | ResumeMemoryReq
ControlReq = (
    FlushCacheReq | PauseGenerationReq | ContinueGenerationReq | UpdateWeightsFromDiskReq | MemoryReq | AdapterReq
)
FrontendToScheduler = (
    TokenizedGenerateReqInput
    | TokenizedEmbeddingReqInput
    | AbortReq
    | ControlReq
    | TokenizerFilesReq
    | GetInternalStateReq
)
SchedulerToFrontend = Rejected | ExclusiveReady | ControlReply | TokenizerFiles | InternalState | BatchEmbeddingOutput
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
    """Detokenization of one request: stop strings, flags, and the point where an earlier attempt stopped."""

    stop: list[str] = []
    include_stop: bool = False
    """Keep the stop string in the text instead of trimming it."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_tail: bytes = b""
    """Last prompt ids (int32), which decide how the first output token joins the prompt."""
    resume: list[Resume] = []
    tokenizer: str = ""
    """SHA-256 of the tokenizer.json that made the ids; empty means the detokenizer's own."""
    min_tokens: int = 0
    """Number of output tokens before which no stop string ends the text. Since 1.1."""
    stops_in_special_tokens: bool = True
    """False if the text of special tokens is read by the frontend only: stop strings neither match inside it nor
    across it. Since 1.1."""
    chars_sent: dict[int, int] = {}
    """Characters of each resumed choice's text that the client already has."""
