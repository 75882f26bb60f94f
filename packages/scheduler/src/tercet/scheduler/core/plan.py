"""What the core asks of an executor for one step, and what comes back: structs, so that every rank can be sent them."""

import msgspec

from tercet.protocol.messages.values import Logprobs, LoRAAdapter, SamplingParams


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose keys and values live and die together: their page tables are kept side by side."""

    name: str
    pages: int
    window: int = 0
    """Tokens of sliding window; 0 sees everything."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor has room for, and what its model allows."""

    page_size: int
    groups: list[CacheGroup]
    slots: int
    context_length: int
    vocab_size: int
    eos_token_ids: list[int] = []
    grammars: str = ""
    """What reads grammars, as name and version; empty where nothing does."""
    adapters: int = 0
    """Places for adapters, each of which many choices can use."""


class SlotInit(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that takes a slot. From here on the executor keeps its token ids; plans name only the slot.

    `tokens` (int32 buffer) are the prompt and whatever output is already known, of a resumed or retracted choice.
    Output position p is the token at index `prompt_tokens + p`.
    """

    slot: int
    tokens: bytes
    prompt_tokens: int
    choice: int
    sampling: SamplingParams
    suppressed_ids: list[int] = []
    """Never sampled while the output is shorter than `sampling.min_new_tokens`: end and stop ids."""
    top_logprobs: int = -1
    """How many alternatives to report beside each sampled token; -1 reports nothing."""
    prompt_logprobs: bool = False
    adapter: int = -1
    """The place of the choice's adapter; -1 is none."""
    request: int = 0
    """Equal for the choices of one request, which share the time that their grammar may take."""


class AdapterLoad(msgspec.Struct, frozen=True):
    """Bring an adapter to a place, from which on it is that of all who have the place."""

    place: int
    adapter: LoRAAdapter


class PageUpdate(msgspec.Struct, frozen=True):
    """Entries `first, first + 1, ...` of a slot's page table, one list of page ids for each cache group."""

    slot: int
    first: int
    pages: list[list[int]]


class PageCopy(msgspec.Struct, frozen=True):
    """Copy one page's keys and values, in every layer of a cache group, before the forward."""

    group: int
    source: int
    target: int


class Row(msgspec.Struct, frozen=True, gc=False):
    """Compute keys and values of the slot's tokens [start, start + count); sample the token after them if asked to.

    count 1 is a decode or the end of a prefill; both are the same work. The executor knows every token of the row:
    it was in `SlotInit.tokens`, or sampled by an earlier plan or forced after it, or is assumed by this one.
    """

    slot: int
    start: int
    count: int
    sample: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Applied in this order: adapters, introduce, pages, copies, assumed, rows. Rows that decode come first.

    A choice may have several rows that decode, one position after another. All but the first compute a token that is
    only `assumed`: what they give counts if it turns out to be the one that the row before sampled.

    Or no step at all, but other `weights` to be loaded: then there is nothing else in it, and whatever an executor knew
    of slots and adapters is void.
    """

    step: int
    weights: str = ""
    """A directory."""
    adapters: list[AdapterLoad] = []
    introduce: list[SlotInit] = []
    pages: list[PageUpdate] = []
    copies: list[PageCopy] = []
    rows: list[Row]
    assumed: dict[int, int] = {}
    """The token at the start of a row, by the row's index."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one plan gave. Maps are keyed by the index of the row in `Plan.rows`."""

    step: int
    token_ids: list[int]
    """One id for each row: the sampled one, or -1 where the row samples nothing or its logits were not finite."""
    logprobs: dict[int, Logprobs] = {}
    """For sampling rows that want it: one entry, of the sampled token."""
    prompt_logprobs: dict[int, Logprobs] = {}
    """For rows of slots with `prompt_logprobs`: of the prompt tokens in (start, start + count], given all before."""
    forced: dict[int, bytes] = {}
    """Tokens (int32 buffer) that the grammar leaves no choice about after the sampled one. The executor has them."""
    complete: list[int] = []
    """Rows whose grammar allows nothing after the tokens given, of which there may be none."""
    errors: dict[int, str] = {}
    """Rows whose choice cannot go on as its grammar wants, and what its client is told."""
    fault: str = ""
    """Why the weights that the plan names could not be loaded, in one line. The model has those that it had."""
    deferred: list[int] = []
    """Rows that sampled nothing because the grammar's mask was late. Their choices sit out until a `MaskReady`."""
