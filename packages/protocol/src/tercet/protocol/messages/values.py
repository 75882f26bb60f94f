"""Values inside messages: sampling parameters, flat number buffers, finish reasons."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, get_args, get_type_hints

import msgspec

from tercet.protocol.messages.audio import AudioFormat, SoundFormat
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encoder_input import EncoderInput
from tercet.protocol.messages.media import ImageFormat
from tercet.protocol.messages.video import VideoFormat

WIRE_VERSION = (1, 1)
"""(major, minor) of the messages. Independent of the package version: see `tercet.protocol.messages.messages`."""

_SWAP = sys.byteorder == "big"


def pack_ints(values: Iterable[int]) -> bytes:
    """Return a flat little-endian int32 buffer. Raises OverflowError for a value outside int32."""
    buffer = array("i", values)
    if _SWAP:  # pragma: no cover
        buffer.byteswap()
    return buffer.tobytes()


def unpack_ints(data: bytes | memoryview) -> Sequence[int]:
    """Return a read-only view of an int32 buffer (big-endian: a copy). Raises ValueError for a torn buffer."""
    if _SWAP:  # pragma: no cover
        return unpack_array(data)
    return memoryview(_whole(data)).cast("i")


def unpack_array(data: bytes | memoryview) -> "array[int]":
    """Return a copy of an int32 buffer, which can grow. Raises ValueError for a torn buffer."""
    buffer = array("i", bytes(_whole(data)))
    if _SWAP:  # pragma: no cover
        buffer.byteswap()
    return buffer


def _whole(data: bytes | memoryview) -> bytes | memoryview:
    if len(data) % 4:
        raise ValueError(f"an int32 buffer cannot hold {len(data)} bytes")
    return data


def pack_floats(values: Iterable[float]) -> bytes:
    """Return a flat little-endian float32 buffer."""
    buffer = array("f", values)
    if _SWAP:  # pragma: no cover
        buffer.byteswap()
    return buffer.tobytes()


def unpack_floats(data: bytes | memoryview) -> Sequence[float]:
    """Return a read-only view of a float32 buffer. Raises ValueError for a torn buffer."""
    if len(data) % 4:
        raise ValueError(f"a float32 buffer cannot hold {len(data)} bytes")
    if _SWAP:  # pragma: no cover
        buffer = array("f", bytes(data))
        buffer.byteswap()
        return buffer
    return memoryview(data).cast("f")


def belongs(rid: str, request: str) -> bool:
    """Return whether a rid is `request`, or one of the prompts of that HTTP request: `request.0`, `request.1`, ...

    A common prefix alone is not enough: peer ids, with which rids begin, may contain dots and are not secret.
    """
    base, dot, number = rid.rpartition(".")
    return rid == request or (bool(dot) and base == request and number.isdecimal())


class Role(StrEnum):
    """Kind of a process, as its peers see it."""

    FRONTEND = "frontend"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    SUPERVISOR = "supervisor"


class Phase(StrEnum):
    """Activity of a process, as reported by its heartbeat."""

    LOADING = "loading"
    COMPILING = "compiling"
    IDLE = "idle"
    STEP = "step"
    DRAINING = "draining"


class MemoryTag(StrEnum):
    """Memory of a scheduler that can be released by itself."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class FinishType(StrEnum):
    """Reason why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class FinishReason(msgspec.Struct, frozen=True):
    """End of one choice; `matched` is the token id or the stop string that ended it."""

    type: FinishType
    matched: int | str | None = None
    message: str = ""
    user_requested: bool = msgspec.field(default=False, name="asked")
    """A client asked for the abort, at any frontend: no frontend dispatches the request again. Since 1.1."""
    code: str = ""
    """Kind of error, as in `Rejected`; empty for an internal failure of the server. Since 1.1."""


class GrammarKind(StrEnum):
    """Notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """llguidance's Lark: rules, terminals, `%json {...}` and special tokens as `<|name|>`."""


class ThinkingBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Maximum tokens of reasoning before `end`, where `end` is several tokens of the vocabulary. Since 1.1."""

    tokens: int
    end: str
    begin: str = ""
    """Text that begins reasoning at the start of the output; empty if the prompt has begun it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Grammar that an output must match, in text that the frontend's compiler has accepted."""

    kind: GrammarKind
    text: str
    thinking: ThinkingBudget | None = None
    """Budget that holds beside the grammar. An end token ends no reasoning that has one. Since 1.1."""


class LoRAAdapter(msgspec.Struct, frozen=True):
    """Low-rank weights that are added to those of a scheduler's model. Since 1.1."""

    path: str
    """Directory on the scheduler's machine, or a name at Hugging Face."""
    sha256: str = ""
    """Hash of its files; a scheduler refuses to run other files. Empty only in a request to load the adapter."""


_INT32 = 2**31 - 1
_UINT64 = 2**64 - 1
_LARGE = 1e6
"""Limit of real numbers on the wire; larger ones would only overflow."""


class Bounds(msgspec.Struct, frozen=True):
    """Least and greatest value of a number; with `above`, the number must be greater than the least."""

    least: float
    greatest: float
    above: bool = False


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a sampling parameter in messages, and those in HTTP APIs, if they differ."""

    wire: Bounds
    api: Bounds | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request. The frontend has validated every value.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1.0` switch those filters off. `seed` keys the noise
    (Philox4x32-10, as `tercet.kernels.ops.philox` defines it), so equal seeds give equal noise in any batch.
    """

    max_new_tokens: Annotated[int, Limits(Bounds(0, _INT32))]
    min_new_tokens: Annotated[int, Limits(Bounds(0, _INT32))] = 0
    n: Annotated[int, Limits(Bounds(1, 128))] = 1
    temperature: Annotated[float, Limits(Bounds(0, _LARGE), api=Bounds(0, 2))] = 1.0
    top_p: Annotated[float, Limits(Bounds(0, 1))] = 1.0
    top_k: Annotated[int, Limits(Bounds(0, _INT32), api=Bounds(-1, _INT32))] = 0
    min_p: Annotated[float, Limits(Bounds(0, 1))] = 0.0
    presence_penalty: Annotated[float, Limits(Bounds(-_LARGE, _LARGE), api=Bounds(-2, 2))] = 0.0
    frequency_penalty: Annotated[float, Limits(Bounds(-_LARGE, _LARGE), api=Bounds(-2, 2))] = 0.0
    repetition_penalty: Annotated[float, Limits(Bounds(1 / _LARGE, _LARGE), api=Bounds(0, 10, above=True))] = 1.0
    seed: Annotated[int, Limits(Bounds(0, _UINT64), api=Bounds(-(2**63), 2**63 - 1))] = 0
    """Unsigned 64-bit."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    grammar: Grammar | None = None
    """Since 1.1: send it only to a scheduler whose `ModelLimits.grammars` names a grammar engine."""


class SamplingField(msgspec.Struct, frozen=True):
    """Numeric sampling parameter. Its neutral value, the default, has no effect; that of `max_new_tokens` is unused."""

    type: type[int] | type[float]
    wire: Bounds
    api: Bounds
    neutral: float


def _sampling_fields() -> dict[str, SamplingField]:
    hints, fields = get_type_hints(SamplingParams, include_extras=True), {}
    for field in msgspec.structs.fields(SamplingParams):
        match get_args(hints[field.name]):
            case (kind, Limits(wire, api)):
                neutral = 0 if field.required else field.default
                fields[field.name] = SamplingField(kind, wire, api or wire, neutral)
    return fields


SAMPLING_FIELDS = _sampling_fields()
"""Numeric fields of `SamplingParams` by name, in their order. HTTP schemas, schedulers and samplers are built on it."""


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a prompt that one step computed. Since 1.1."""

    at: float
    """Seconds from the choice's arrival until the step was planned."""
    tokens: int


class LogprobParams(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities that a request wants; `prompt` asks for those of the prompt's own tokens too."""

    top: int = 0
    prompt: bool = False


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of consecutive tokens, as flat buffers.

    `chosen` is float32 [tokens]; `top_ids` int32 and `top_logprobs` float32 are both [tokens * top].
    A prompt's first token has no log-probability: its entry is NaN. `times` (float32) are for `Transcript.TIMES`: the
    second at which each token of the text ends in the audio clip, of which all are in one part of the prompt's.
    """

    chosen: bytes
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    times: bytes = b""

    def __len__(self) -> int:
        return len(self.chosen) // 4

    def first(self, tokens: int) -> "Logprobs":
        """Return the entries of the first `tokens` tokens."""
        cut = 4 * tokens
        return Logprobs(
            self.chosen[:cut], self.top, self.top_ids[: cut * self.top], self.top_logprobs[: cut * self.top]
        )


class Resume(msgspec.Struct, frozen=True):
    """Choice that continues where an earlier attempt stopped: `output_ids` (int32 buffer) were already emitted."""

    index: int
    output_ids: bytes = b""


class Task(StrEnum):
    """Kind of a model's output."""

    GENERATE = "generate"
    EMBED = "embed"
    """One vector for each input."""
    CLASSIFY = "classify"
    """One score for each label and input: classifiers, and rerankers, which have one label."""


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a scheduler's model that a frontend needs to validate requests."""

    model: str
    context_length: int
    vocab_size: int
    max_total_tokens: int
    """Tokens of KV cache: no single request can be longer."""
    eos_token_ids: list[int] = []
    task: Task = Task.GENERATE
    """Since 1.1, like the fields that follow."""
    grammars: str = ""
    """Name and version of the grammar engine; empty if there is none."""
    width: int = 0
    """Numbers in the vector of one input, for tasks that return vectors."""
    labels: list[str] = []
    """Names of a classifier's scores, in order."""
    max_loras: int = 0
    """Number of adapters that can run side by side; 0 if none can."""
    images: ImageFormat | None = None
    """Form of images; None if the scheduler takes none."""
    audio: AudioFormat | None = None
    """Form of audio; None if the scheduler takes none. With it, each request has an audio clip."""
    sounds: SoundFormat | None = None
    """Form of sounds in prompts; None if the scheduler takes none. A model with it takes no images."""
    embeddings: EmbeddingForm | None = None
    """Form of embeddings that are taken in the place of arrays, whose form is in it and not in `images` or `sounds`."""
    video: VideoFormat | None = None
    """Form of clips; None if the scheduler takes none."""
    encoder: EncoderInput | None = None
    """Prompts of a model with an encoder of text; None for other models."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprints: equal `weights` let a request continue elsewhere, `files` are keys of a frontend's cache."""

    weights: str
    """Fingerprint of revision, dtype and quantization."""
    files: dict[str, str] = {}
    """File name to SHA-256: tokenizer, chat template and generation config."""
    path: str = ""
    """Model directory on the scheduler's machine."""
    weights_path: str = ""
    """Directory that the weights were loaded from, if it is another. Since 1.1."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a scheduler, for routers and autoscalers."""

    queued: int = 0
    running: int = 0
    queued_tokens: int = 0
    running_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    page_size: int = 1
    slots_total: int = 0
    slots_free: int = 0
    retractions: int = 0
    cached_prompt_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    updating: bool = False
    """New requests wait for replacement weights. Since 1.1, like the fields that follow."""
    drafted_tokens: int = 0
    """Draft tokens verified since the start."""
    accepted_tokens: int = 0
    """Draft tokens accepted, which saved a step each."""
    released: list[MemoryTag] = []
    """Memory that was given back to the system; requests wait while there is any."""

    @property
    def pages_used(self) -> int:
        """Return the pages that running requests hold."""
        return self.pages_total - self.pages_free - self.pages_cached


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Choices a scheduler or detokenizer holds for one frontend: parallel lists, numbers as int32 buffers."""

    rids: list[str] = []
    indices: bytes = b""
    attempts: bytes = b""
    positions: bytes = b""
    """Next position that each choice will emit."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Sample of a frontend's counter or gauge."""

    labels: list[str] = []
    """Label values, in the order of the metric's label names."""
    value: float


class Exemplar(msgspec.Struct, frozen=True, kw_only=True):
    """Observed value whose request is traced. Since 1.1."""

    trace_id: str
    value: float
    at: float
    """Unix time."""


class HistogramSample(msgspec.Struct, frozen=True, kw_only=True):
    """Histogram of a frontend."""

    labels: list[str] = []
    """Label values, as in Sample."""
    buckets: list[int]
    """Observations per bucket, not cumulative; the last bucket has those above all bounds."""
    sum: float
    exemplars: dict[int, Exemplar] = {}
    """Latest traced value of a bucket. Since 1.1."""
