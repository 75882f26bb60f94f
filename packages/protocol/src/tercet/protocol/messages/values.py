"""The values that messages are made of: sampling parameters, flat number buffers, finish reasons."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

WIRE_VERSION = (1, 1)
"""(major, minor) of the messages. It moves apart from the package version: see `tercet.protocol.messages.messages`."""

_SWAP = sys.byteorder == "big"


def pack_ints(values: Iterable[int]) -> bytes:
    """A flat little-endian int32 buffer. Raises OverflowError for a value outside int32."""
    buffer = array("i", values)
    if _SWAP:  # pragma: no cover
        buffer.byteswap()
    return buffer.tobytes()


def unpack_ints(data: bytes | memoryview) -> Sequence[int]:
    """A read-only view of an int32 buffer; a copy only on big-endian machines. Raises ValueError for a torn buffer."""
    if _SWAP:  # pragma: no cover
        return unpack_array(data)
    return memoryview(_whole(data)).cast("i")


def unpack_array(data: bytes | memoryview) -> "array[int]":
    """A copy of an int32 buffer, which can grow. Raises ValueError for a torn buffer."""
    buffer = array("i", bytes(_whole(data)))
    if _SWAP:  # pragma: no cover
        buffer.byteswap()
    return buffer


def _whole(data: bytes | memoryview) -> bytes | memoryview:
    if len(data) % 4:
        raise ValueError(f"an int32 buffer cannot hold {len(data)} bytes")
    return data


def pack_floats(values: Iterable[float]) -> bytes:
    """A flat little-endian float32 buffer."""
    buffer = array("f", values)
    if _SWAP:  # pragma: no cover
        buffer.byteswap()
    return buffer.tobytes()


def unpack_floats(data: bytes | memoryview) -> Sequence[float]:
    """A read-only view of a float32 buffer. Raises ValueError for a torn buffer."""
    if len(data) % 4:
        raise ValueError(f"a float32 buffer cannot hold {len(data)} bytes")
    if _SWAP:  # pragma: no cover
        buffer = array("f", bytes(data))
        buffer.byteswap()
        return buffer
    return memoryview(data).cast("f")


def belongs(rid: str, request: str) -> bool:
    """Whether a rid is that of `request`, or of one of the prompts of one HTTP request: `request.0`, `request.1`, ...

    Nothing else that begins alike: peers, which rids begin with, may have dots in their names, and are no secret.
    """
    base, dot, number = rid.rpartition(".")
    return rid == request or (bool(dot) and base == request and number.isdecimal())


class Role(StrEnum):
    """What a process is to its peers."""

    FRONTEND = "frontend"
    SCHEDULER = "scheduler"
    DETOKENIZER = "detokenizer"
    SUPERVISOR = "supervisor"


class Phase(StrEnum):
    """What a process is doing, as its heartbeat says."""

    LOADING = "loading"
    COMPILING = "compiling"
    IDLE = "idle"
    STEP = "step"
    DRAINING = "draining"


class FinishType(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class FinishReason(msgspec.Struct, frozen=True):
    """The end of one choice; `matched` is the token id or the stop string that ended it."""

    type: FinishType
    matched: int | str | None = None
    message: str = ""
    user_requested: bool = msgspec.field(default=False, name="asked")
    """An abort that somebody asked for, at whatever frontend: nobody goes on with the request. Since 1.1."""
    code: str = ""
    """What kind of error it is, as in `Rejected`; empty for a failure of the server's. Since 1.1."""


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """As llguidance reads it: rules, terminals, `%json {...}` and special tokens as `<|name|>`."""


class Grammar(msgspec.Struct, frozen=True):
    """What an output must be an instance of, in text that the frontend's helper has accepted."""

    kind: GrammarKind
    text: str


class LoRAAdapter(msgspec.Struct, frozen=True):
    """Low-rank weights that are added to those of a scheduler's model. Since 1.1."""

    path: str
    """A directory on the scheduler's machine, or a name at Hugging Face."""
    sha256: str = ""
    """Of its files: with others there it is not run. Empty only where a scheduler is asked for it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. The frontend has validated every value.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1.0` switch those filters off. `seed` keys the noise
    (Philox4x32-10, as `tercet.kernels.ops.philox` defines it), so equal seeds give equal noise whatever else runs.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Unsigned 64-bit."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    grammar: Grammar | None = None
    """Since 1.1: send it only to a scheduler whose `ModelLimits.grammars` says what reads it there."""


class LogprobParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probabilities a request wants; `prompt` asks for those of the prompt's own tokens too."""

    top: int = 0
    prompt: bool = False


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of consecutive tokens, as flat buffers.

    `chosen` is float32 [tokens]; `top_ids` int32 and `top_logprobs` float32 are both [tokens * top].
    A prompt's first token has no log-probability: its entry is NaN.
    """

    chosen: bytes
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""

    def __len__(self) -> int:
        return len(self.chosen) // 4

    def first(self, tokens: int) -> "Logprobs":
        """The entries of the first `tokens` tokens."""
        cut = 4 * tokens
        return Logprobs(
            self.chosen[:cut], self.top, self.top_ids[: cut * self.top], self.top_logprobs[: cut * self.top]
        )


class Resume(msgspec.Struct, frozen=True):
    """One choice that goes on where an earlier attempt stopped: `output_ids` (int32 buffer) were already emitted."""

    index: int
    output_ids: bytes = b""


class Task(StrEnum):
    """What a model is for."""

    GENERATE = "generate"
    EMBED = "embed"
    """One vector for each input."""
    CLASSIFY = "classify"
    """One score for each label and input: classifiers, and rerankers, which have one label."""


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend must know of a scheduler's model to validate requests."""

    model: str
    context_length: int
    vocab_size: int
    max_total_tokens: int
    """Tokens of KV cache: no single request can be longer."""
    eos_token_ids: list[int] = []
    task: Task = Task.GENERATE
    """Since 1.1, like what follows."""
    grammars: str = ""
    """What reads grammars there, as name and version; empty where nothing does."""
    width: int = 0
    """Numbers in the vector of one input, for tasks that give vectors."""
    labels: list[str] = []
    """Names of a classifier's scores, in order."""
    max_loras: int = 0
    """How many adapters can run side by side; 0 where none can."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for a request to go on elsewhere (`weights`) and what a frontend caches files by (`files`)."""

    weights: str
    """Fingerprint of revision, dtype and quantization."""
    files: dict[str, str] = {}
    """File name to SHA-256: tokenizer, chat template and generation config."""
    path: str = ""
    """The model directory on the scheduler's machine."""
    weights_path: str = ""
    """The directory that weights were taken from, if it is another. Since 1.1."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a scheduler is: what routers and autoscalers read."""

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
    """Whether new requests wait for other weights. Since 1.1, like what follows."""
    drafted_tokens: int = 0
    """Tokens that were guessed and checked, since the start."""
    accepted_tokens: int = 0
    """Those that were right, and so took no step of their own."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The choices a scheduler or detokenizer holds for one frontend: parallel lists, numbers as int32 buffers."""

    rids: list[str] = []
    indices: bytes = b""
    attempts: bytes = b""
    positions: bytes = b""
    """The next position each choice will emit."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One number that a frontend counts."""

    labels: list[str] = []
    """What its labels say, in the order that its name has them in."""
    value: float


class HistogramSample(msgspec.Struct, frozen=True, kw_only=True):
    """One histogram that a frontend counts."""

    labels: list[str] = []
    """As in Sample."""
    buckets: list[int]
    """Observations up to each bound, those of lower bounds left out, and those above all."""
    sum: float
