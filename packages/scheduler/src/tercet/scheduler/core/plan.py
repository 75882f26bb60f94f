"""Plan of one step, and its result: structs, so that every rank can be sent them."""

import msgspec

from tercet.protocol.messages.audio import SoundFormat
from tercet.protocol.messages.media import ImageFormat
from tercet.protocol.messages.values import Logprobs, MemoryTag, SamplingParams
from tercet.protocol.messages.video import VideoFormat
from tercet.scheduler.core.images import PlannedImage
from tercet.scheduler.core.places.loads import (
    AdapterLoad,
    AudioCapacity,
    AudioLoad,
    PlannedAudio,
    TextCapacity,
    TextLoad,
)


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one page table. At most one group has a window: the last one."""

    name: str
    pages: int
    window: int = 0
    """Tokens of the longest sliding window; such a group keeps no earlier pages. 0 keeps all, as do all groups beside
    recurrent states.
    """


def excess_tokens(images: ImageFormat | None, *, whole: bool) -> int:
    """Return the tokens by which a step may exceed its budget: less than an image if these stay whole."""
    return images.max_tokens - 1 if images is not None and whole else 0


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an executor and of its model."""

    page_size: int
    groups: list[CacheGroup]
    slots: int
    snapshots: int | None = None
    """Snapshots of a slot's recurrent state that fit; None if the model keeps no recurrent state."""
    context_length: int
    vocab_size: int
    eos_token_ids: list[int] = []
    grammars: str = ""
    """Name and version of the grammar backend; empty if grammars are not supported."""
    adapters: int = 0
    """Number of adapter slots. Many choices can use each."""
    images: ImageFormat | None = None
    """Form of images; None if the model takes none."""
    whole_images: bool = False
    """The tokens of an image see each other, so one step computes all that are not cached."""
    audio: AudioCapacity | None = None
    """Audio of each request; None if the model takes none."""
    texts: TextCapacity | None = None
    """Texts that an encoder reads, one for each request; None if the model has no such encoder."""
    sounds: SoundFormat | None = None
    """Form of sounds in prompts; None if the model takes none."""
    video: VideoFormat | None = None
    """Form of clips; None if the model takes none."""

    @property
    def excess_tokens(self) -> int:
        """Return the tokens by which a step may exceed its budget, so that it does not cut an image."""
        return excess_tokens(self.images, whole=self.whole_images)


class SlotInit(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that takes a slot. The executor keeps its token ids from then on; plans name only the slot.

    `tokens` (int32 buffer) are the prompt and the known output of a resumed or retracted choice. Output position p is
    the token at index `prompt_tokens + p`.
    """

    slot: int
    tokens: bytes
    prompt_tokens: int
    choice: int
    sampling: SamplingParams
    suppressed_ids: list[int] = []
    """Ids of end and stop tokens, never sampled while the output is shorter than `sampling.min_new_tokens`."""
    top_logprobs: int = -1
    """Number of alternatives to report beside each sampled token; -1 reports no log-probabilities."""
    prompt_logprobs: bool = False
    adapter: int = -1
    """Slot of the choice's adapter; -1 is none."""
    request: int = 0
    """Number of the request. Its choices share the time that their grammar may take."""
    images: list[PlannedImage] = []  # in order
    audio: PlannedAudio | None = None
    text: int = -1
    """Place of the encoded text that the choice answers; -1 is none."""


class PageUpdate(msgspec.Struct, frozen=True):
    """Entries `first, first + 1, ...` of a slot's page table, one list of page ids for each cache group.

    The entries of a group whose list is empty, or left out at the end, do not change. Those before a window are void.
    """

    slot: int
    first: int
    pages: list[list[int]]


class PageCopy(msgspec.Struct, frozen=True):
    """Copy of one page's keys and values, in every layer of a cache group, before the forward pass."""

    group: int
    source: int
    target: int
    rank: int = 0
    """Attention rank."""


class StateRestore(msgspec.Struct, frozen=True):
    """Copy of a snapshot to a slot's recurrent state, before the forward pass."""

    slot: int
    snapshot: int


class StateSnapshot(msgspec.Struct, frozen=True):
    """Copy of a slot's recurrent state to a snapshot, when `tokens` tokens of a row are computed."""

    row: int
    tokens: int
    snapshot: int


class Row(msgspec.Struct, frozen=True, gc=False):
    """Row of a step: computes keys and values of the slot's tokens [start, start + count), and may sample the next one.

    count 1 is a decode or the end of a prefill; both are the same work. The executor knows every token of the row: it
    was in `SlotInit.tokens`, was sampled by an earlier plan or forced after it, or is a draft token of this plan.
    """

    slot: int
    start: int
    count: int
    sample: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of one step.

    It is applied in this order: adapters, audio, texts, introduce, pages, copies, restores, draft tokens, rows, encode.
    Decodes come first. A row that starts at 0 begins with an empty recurrent state, any other with its slot's.

    A choice may have several rows that decode, at consecutive positions. All but the first compute a draft token in
    `draft_tokens`: their output counts only if that token is the one that the row before sampled.

    A plan with `weights` or `released` is not a step: it has no other content, and voids all slots, adapters,
    audio clips and texts of the executor.
    """

    step: int
    weights: str = ""
    """Directory of the weights to load."""
    released: list[MemoryTag] | None = None
    """Memory that the executor is without from now on; it has all other memory."""
    adapters: list[AdapterLoad] = []
    audio: list[AudioLoad] = []
    texts: list[TextLoad] = []
    introduce: list[SlotInit] = []
    pages: list[PageUpdate] = []
    copies: list[PageCopy] = []
    restores: list[StateRestore] = []
    snapshots: list[StateSnapshot] = []
    """Snapshots to take, in the order of rows and tokens."""
    rows: list[Row]
    draft_tokens: dict[int, int] = msgspec.field(default_factory=dict, name="assumed")
    """Draft token at the start of a row, by the row's index."""
    encode: dict[int, int] = {}
    """Slots whose images, audio or text to encode beside the rows, the first one first, and their computed tokens."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one plan. Maps are keyed by the index of the row in `Plan.rows`."""

    step: int
    token_ids: list[int]
    """One id for each row: the sampled one, or -1 if the row samples nothing or its logits were not finite."""
    logprobs: dict[int, Logprobs] = {}
    """Entry of the sampled token, for sampling rows that request log-probabilities."""
    prompt_logprobs: dict[int, Logprobs] = {}
    """Entries of the prompt tokens in (start, start + count], given all before, for slots with `prompt_logprobs`."""
    forced: dict[int, bytes] = {}
    """Tokens (int32 buffer) that the grammar forces after the sampled one. The executor has them."""
    complete: list[int] = []
    """Rows whose grammar allows nothing after their tokens, of which there may be none."""
    errors: dict[int, str] = {}
    """Rows whose choice its grammar ends with an error, and the message for the client."""
    fault: str = ""
    """Reason why the plan's weights or memory are not there, in one line. The executor keeps those from before."""
    deferred: list[int] = []
    """Rows that sampled nothing because the grammar's mask was late. Their choices sit out until a `MaskReady`."""
    encoded: dict[int, int] = {}
    """Tokens up to the next image, audio clip or text that is not encoded yet, by slot of `Plan.encode`."""
