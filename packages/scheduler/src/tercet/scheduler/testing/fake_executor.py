"""Fake executor without torch: `FakeExecutor` runs plans in plain Python, for tests, simulations and load tests."""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tercet.protocol.messages.audio import AudioFormat, AudioInput, TranscriptTokens
from tercet.protocol.messages.encoder_input import EncoderInput
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.values import (
    Logprobs,
    LoRAAdapter,
    MemoryTag,
    SamplingParams,
    pack_floats,
    pack_ints,
    unpack_ints,
)
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.images import PlannedImage
from tercet.scheduler.core.places.loads import AudioCapacity, TextCapacity, TextLoad
from tercet.scheduler.core.plan import (
    CacheGroup,
    Capacity,
    Plan,
    Row,
    SlotInit,
    StateSnapshot,
    StepResult,
)
from tercet.scheduler.executor.weights_loader import weights_loader

_T = TypeVar("_T")
_MASK = (1 << 61) - 1
FAKE_AUDIO = AudioFormat(
    rate=100,
    samples=3000,
    tokens=TranscriptTokens(start=1, no_timestamps=2, first_timestamp=3, timestamp_seconds=0.02),
)

ScriptedGrammar = Callable[[Sequence[int]], tuple[Sequence[int], bool]]
"""Returns, for the prompt and output so far, the tokens that must follow, and whether the output must end.

It decides by the last tokens, so that it gives the same result in the middle of forced tokens.
"""


class StaleCacheError(AssertionError):
    """A plan would attend to keys and values of other tokens than its own."""


def small_capacity(
    *,
    pages: int = 32,
    page_size: int = 4,
    slots: int = 8,
    context_length: int = 256,
    vocab_size: int = 50,
    grammars: str = "",
    adapters: int = 0,
    snapshots: int | None = None,
    images: ImageFormat | None = None,
    whole_images: bool = False,
    audio: int = 0,
    text_pages: int = 0,
) -> Capacity:
    """Return a capacity for tests."""
    form = EncoderInput(tokens=text_pages * page_size, start=[1])
    texts = TextCapacity(form=form, places=min(text_pages, 4 * slots), pages=text_pages, page_size=page_size)
    return Capacity(
        page_size=page_size,
        groups=[CacheGroup("full", pages)],
        slots=slots,
        context_length=context_length,
        vocab_size=vocab_size,
        eos_token_ids=[0],
        grammars=grammars,
        adapters=adapters,
        snapshots=snapshots,
        images=images,
        whole_images=whole_images,
        audio=AudioCapacity(form=FAKE_AUDIO, places=audio) if audio else None,
        texts=texts if text_pages else None,
    )


def seen_tokens(ids: bytes, images: Sequence[ImageInput | PlannedImage]) -> list[int]:
    """Return what the fake model sees: ids, and numbers made of an image's hash in its place."""
    tokens = list(unpack_ints(ids))
    for each in images:
        first = int.from_bytes(each.sha256[:8])
        tokens[each.first : each.first + each.tokens] = range(first, first + each.tokens)
    return tokens


@dataclass
class Done:
    """A step that is already finished."""

    value: StepResult
    on_result: Callable[[], None] = lambda: None

    def result(self) -> StepResult:
        self.on_result()
        return self.value


class _InlineExecutor(Executor):
    """Threads that run each call when it is submitted."""

    def submit(self, call: Callable[..., _T], /, *given: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_result(call(*given, **named))
        return future


@dataclass(frozen=True)
class _FakeAdapter:
    """An adapter whose hash is the expected one, or made of the path alone."""

    sha256: str


def _load_adapter(adapter: LoRAAdapter) -> _FakeAdapter:
    return _FakeAdapter(adapter.sha256 or hashlib.sha256(adapter.path.encode()).hexdigest())


class FakeLateMasks:
    """Late masks that are ready on the next call, unless they are held back."""

    def __init__(self) -> None:
        self.held_back = False
        """If set, no mask becomes ready."""
        self.waiting: list[tuple[int, int]] = []

    @property
    def busy(self) -> bool:
        """Return whether a mask was late."""
        return bool(self.waiting)

    def pop_ready(self, wait: float = 0.0) -> list[tuple[int, int]]:  # noqa: ARG002
        """Return (slot, step) of all late masks, unless they are held back."""
        if self.held_back:
            return []
        ready, self.waiting = self.waiting, []
        return ready


@dataclass
class _Slot:
    init: SlotInit
    adapter: LoRAAdapter | None
    encoded: bytes
    """Hash of its audio clip, or tokens of its text."""
    tokens: list[int]
    hashes: list[int] = field(default_factory=list)
    """Hashes of all prefixes: entry i covers tokens 0 to i."""
    tables: dict[tuple[int, int], int] = field(default_factory=dict)
    """Page ids by cache group and place in the page table."""
    state: int | None = None
    """Hash of the prefix that its recurrent state covers; None before its first token."""


@dataclass
class _Chain:
    """Rows of a slot, of which all but the first compute a draft token."""

    start: int
    """Position of the first of these tokens."""
    assumed: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    """Tokens of the accepted rows, and the forced ones after the last of them."""
    right: bool = True

    def goes_on(self, token: int, *, ends: bool) -> bool:
        """Return whether the next row's draft token equals this token. If not, all later rows are wrong, too."""
        place = len(self.said)
        self.right = not ends and place < len(self.assumed) and self.assumed[place] == token
        return self.right


class FakeExecutor:
    """Executor whose next token is a hash of all tokens before it, of adapter, audio, text and weights.

    Any mistake in these shows in the output. With `verify`, each page remembers the hash of the prefix it holds at each
    offset, and a row that would attend to another raises StaleCacheError: this detects wrong sharing, early reuse and
    missing copies. Recurrent states and their snapshots are verified in the same way.

    A token's log-probability is minus its position, in the output or in the prompt. Grammars are not read: one script,
    if given, stands for all of them.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        verify: bool = True,
        before_step: Callable[[Plan], None] | None = None,
        grammar: ScriptedGrammar | None = None,
        weights: str = "",
        defers: Callable[[Plan, Row], bool] = lambda _, __: False,
        encode_steps: int = 1,
    ) -> None:
        """Create an executor. `defers` returns whether the mask of a sampling row with a grammar is late.

        Every image, audio clip and text takes `encode_steps` steps to encode.
        """
        self.weights = weights_loader(_check_directory)
        self.adapters = AsyncLoader(_load_adapter, _InlineExecutor()) if capacity.adapters else None
        self._loaded = weights
        self._released: set[MemoryTag] = set()
        self._capacity = capacity
        self._verify = verify
        self._before_step = before_step
        self._grammar = grammar
        self._defers = defers
        self._encode_steps = encode_steps
        self._encoding: Counter[bytes | int] = Counter()
        """Steps that were spent on each image, by hash, and on each place of an audio clip or a text."""
        self._late = FakeLateMasks()
        self._slots: dict[int, _Slot] = {}
        self._adapters: dict[int, LoRAAdapter] = {}
        """Adapters by slot."""
        self._encoded_at: dict[int, bytes] = {}
        """Hashes of audio clips, or tokens of texts, by place."""
        self._text_pages: dict[int, list[int]] = {}
        """Pages of texts by place."""
        self._cache: dict[tuple[int, int, int], int] = {}
        """Prefix hash by (cache group, page, offset)."""
        self._snapshots: dict[int, int | None] = {}
        """State by snapshot."""

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def grammars(self) -> None:
        """Return None: grammars need no reading."""
        return

    @property
    def images(self) -> None:
        """Return None: images are told apart by their hashes."""
        return

    @property
    def audio(self) -> None:
        """Return None: audio clips are told apart by their hashes."""
        return

    @property
    def late_masks(self) -> FakeLateMasks:
        return self._late

    def prepare(self) -> bool:
        return False

    def submit(self, plan: Plan) -> Done:
        """Run a plan at once."""
        if self._before_step is not None:
            self._before_step(plan)
        self._set_memory(plan)
        for load in plan.adapters:
            if not 0 <= load.place < self._capacity.adapters:
                raise IndexError(f"there is no place {load.place}")
            self._adapters[load.place] = load.adapter
        for clip in plan.audio:
            if self._capacity.audio is None or not 0 <= clip.place < self._capacity.audio.places:
                raise IndexError(f"there is no place {clip.place}")
            self._encoded_at[clip.place] = clip.sha256
            self._encoding[clip.place] = 0
        for text in plan.texts:
            self._load_text(text)
        for init in plan.introduce:
            adapter = None if init.adapter < 0 else self._adapters[init.adapter]
            place = _place_of(init)
            encoded = b"" if place < 0 else self._encoded_at[place]
            self._slots[init.slot] = _Slot(init, adapter, encoded, seen_tokens(init.tokens, init.images))
        for update in plan.pages:
            for group, pages in enumerate(update.pages):
                self._slots[update.slot].tables.update(
                    {(group, place): page for place, page in enumerate(pages, start=update.first)}
                )
        for copy in plan.copies:
            for offset in range(self._capacity.page_size):
                copied = self._cache.get((copy.group, copy.source, offset), -1)
                self._cache[copy.group, copy.target, offset] = copied
        for restore in plan.restores:
            self._slots[restore.slot].state = self._snapshots[restore.snapshot]
        late: list[tuple[int, int]] = []
        result = self._result(plan)
        result.encoded.update(self._encoded(plan.encode))
        late += [(plan.rows[index].slot, plan.step) for index in result.deferred]

        def tell() -> None:
            self._late.waiting += late
            late.clear()

        return Done(result, tell)

    def _load_text(self, load: TextLoad) -> None:
        """Take the pages of a text from the texts that had them."""
        texts = self._capacity.texts
        if texts is None or not 0 <= load.place < texts.places or not {*load.pages} <= {*range(texts.pages)}:
            raise IndexError(f"there are no places like {load}")
        if len(load.pages) * texts.page_size < len(unpack_ints(load.ids)):
            raise IndexError(f"{load} has too few pages")
        taken = [place for place, pages in self._text_pages.items() if {*pages} & {*load.pages}]
        for place in {*taken, load.place}:
            self._encoded_at.pop(place, None)
            self._text_pages.pop(place, None)
        self._encoded_at[load.place], self._text_pages[load.place] = load.ids, load.pages
        self._encoding[load.place] = 0

    def _encoded(self, encode: Mapping[int, int]) -> dict[int, int]:
        """Encode the first image, audio clip or text that is not encoded for a step. Return slots' readable tokens."""
        readable = {slot: self._unread(slot, computed) for slot, computed in encode.items()}
        first = next((what for _, what in readable.values() if what is not None), None)
        if first is not None:
            self._encoding[first] += 1
        return {slot: self._unread(slot, computed)[0] for slot, computed in encode.items()}

    def _unread(self, number: int, computed: int) -> tuple[int, bytes | int | None]:
        """Return the readable tokens of a slot, and what follows them."""
        slot = self._slots[number]
        if (place := _place_of(slot.init)) >= 0 and self._encoding[place] < self._encode_steps:
            return 0, place
        for each in slot.init.images:
            if each.first + each.tokens > computed and self._encoding[each.sha256] < self._encode_steps:
                return each.first, each.sha256
        return len(slot.tokens), None

    def _set_memory(self, plan: Plan) -> None:
        if plan.weights:
            self._loaded = plan.weights
            self._released.discard(MemoryTag.WEIGHTS)
        if plan.released is not None:
            self._released = {*plan.released}
        if plan.weights or plan.released is not None:
            for void in (self._slots, self._adapters, self._encoded_at, self._encoding, self._cache, self._snapshots):
                void.clear()
        elif self._released:
            raise StaleCacheError(f"step {plan.step} uses released memory")

    def close(self) -> None:
        """Stop the thread that checks weights."""
        self.weights.close()

    def next_token(
        self,
        tokens: Sequence[int],
        choice: int = 0,
        suppressed: Collection[int] = (),
        adapter: LoRAAdapter | None = None,
        audio: AudioInput | None = None,
        text: bytes = b"",
    ) -> int:
        """Return the model's token after `tokens`, for tests that know the answer without a scheduler."""
        value = self._first(adapter, text if audio is None else audio.sha256)
        for token in tokens:
            value = _extend(value, token)
        return self._sampled(value, choice, suppressed)

    def follow(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[Sequence[int], bool]:
        """Return the grammar's result after `tokens`; see `ScriptedGrammar`."""
        return ((), False) if self._grammar is None or sampling.grammar is None else self._grammar(tokens)

    def _first(self, adapter: LoRAAdapter | None, encoded: bytes) -> int:
        """Return the hash before the first token."""
        made_of = self._loaded + ("" if adapter is None else adapter.sha256) + encoded.hex()
        return int(hashlib.sha256(made_of.encode()).hexdigest(), 16) & _MASK if made_of else 0

    def _result(self, plan: Plan) -> StepResult:
        result = StepResult(step=plan.step, token_ids=[])
        chains = _chains(plan)
        for index, row in enumerate(plan.rows):
            slot, chain = self._slots[row.slot], chains.get(row.slot)
            if index in plan.draft_tokens:
                slot.tokens[row.start :] = [plan.draft_tokens[index]]
            if row.sample:
                del slot.tokens[row.start + row.count :]  # tokens after wrong draft tokens
            self._compute(slot, row)
            if self._verify and self._capacity.snapshots is not None:
                self._advance_state(slot, row, [each for each in plan.snapshots if each.row == index])
            if slot.init.prompt_logprobs and row.start < slot.init.prompt_tokens - 1:
                count = min(row.start + row.count, slot.init.prompt_tokens - 1) - row.start
                told = (-float(row.start + at) for at in range(1, count + 1))
                result.prompt_logprobs[index] = Logprobs(pack_floats(told))
            if not row.sample:
                result.token_ids.append(-1)
            elif slot.init.sampling.grammar is not None and index not in plan.draft_tokens and self._defers(plan, row):
                result.token_ids.append(-1)
                result.deferred.append(index)
                if chain is not None:
                    chain.right = False
            elif chain is None or chain.right:
                result.token_ids.append(self._sample(slot, index, result, chain))
            else:
                result.token_ids.append(self._sample(slot, index, StepResult(step=0, token_ids=[]), None))
        for number, chain in chains.items():
            slot = self._slots[number]
            slot.tokens[chain.start :] = chain.said
            del slot.hashes[chain.start :]
        return result

    def _sample(self, slot: _Slot, index: int, result: StepResult, chain: "_Chain | None") -> int:
        """Return the token of a row, and add its other outputs to the result.

        Forced tokens are left out if the next row of the chain has the right draft token.
        """
        init = slot.init
        must, ends = self.follow(slot.tokens, init.sampling)
        known = len(slot.tokens)
        if not ends:
            position = known - init.prompt_tokens
            suppressed = init.suppressed_ids if position < init.sampling.min_new_tokens else ()
            slot.tokens.append(must[0] if must else self._sampled(slot.hashes[-1], init.choice, suppressed))
            must, ends = self.follow(slot.tokens, init.sampling)
            if init.top_logprobs >= 0:
                result.logprobs[index] = Logprobs(pack_floats([-float(position)]))
            if not (chain is not None and chain.goes_on(slot.tokens[-1], ends=ends)) and init.top_logprobs < 0 and must:
                slot.tokens += must
                result.forced[index] = pack_ints(must)
                ends = self.follow(slot.tokens, init.sampling)[1]
        elif chain is not None:
            chain.right = False
        if ends:
            result.complete.append(index)
        if chain is not None:
            chain.said += slot.tokens[known:]
        return slot.tokens[known] if len(slot.tokens) > known else -1

    def _sampled(self, value: int, choice: int, suppressed: Collection[int]) -> int:
        token = _extend(value, choice) % self._capacity.vocab_size
        while token in suppressed:
            token = (token + 1) % self._capacity.vocab_size
        return token

    def _compute(self, slot: _Slot, row: Row) -> None:
        size, end = self._capacity.page_size, row.start + row.count
        if self._unread(row.slot, row.start)[0] < end:
            raise StaleCacheError(f"slot {row.slot} reads what is not encoded before token {end}")
        if slot.adapter is not None and self._adapters[slot.init.adapter] != slot.adapter:
            raise StaleCacheError(f"slot {row.slot} lost its adapter to another")
        if (place := _place_of(slot.init)) >= 0 and self._encoded_at.get(place) != slot.encoded:
            raise StaleCacheError(f"slot {row.slot} lost its audio or text to another")
        for each in slot.init.images if self._capacity.whole_images else ():
            if each.first < end < each.first + each.tokens:
                raise StaleCacheError(f"the plan cuts the image at {each.first} after token {end - 1}")
        if end > len(slot.tokens):
            raise StaleCacheError(f"the plan computes token {end - 1} of {len(slot.tokens)} known")
        while len(slot.hashes) < end:
            at = len(slot.hashes)
            slot.hashes.append(
                _extend(slot.hashes[-1] if at else self._first(slot.adapter, slot.encoded), slot.tokens[at])
            )
        del slot.hashes[end:]
        if not self._verify:
            return
        for number, group in enumerate(self._capacity.groups):
            first = max(0, row.start - group.window + 1) if group.window else 0
            for position in range(first, row.start):
                page = slot.tables.get((number, position // size), -1)
                if self._cache.get((number, page, position % size)) != slot.hashes[position]:
                    raise StaleCacheError(f"slot {row.slot} attends to a stale entry at position {position}")
            for position in range(row.start, end):
                page = slot.tables[number, position // size]
                self._cache[number, page, position % size] = slot.hashes[position]

    def _advance_state(self, slot: _Slot, row: Row, snapshots: Sequence[StateSnapshot]) -> None:
        """Advance the slot's recurrent state by a row, and take its snapshots on the way."""
        before = slot.hashes[row.start - 1] if row.start else None
        if row.start and slot.state != before:
            raise StaleCacheError(f"slot {row.slot} has not the state of its first {row.start} tokens")
        for each in snapshots:
            if not 0 <= each.snapshot < (self._capacity.snapshots or 0) or not 0 <= each.tokens <= row.count:
                raise IndexError(f"{each} is outside of its row or of the snapshots")
            self._snapshots[each.snapshot] = slot.hashes[row.start + each.tokens - 1] if each.tokens else before
        slot.state = slot.hashes[row.start + row.count - 1]


def _place_of(init: SlotInit) -> int:
    """Return the place of a choice's encoded audio or text; -1 for none."""
    return init.text if init.audio is None else init.audio.place


def _chains(plan: Plan) -> dict[int, _Chain]:
    """Return the chains of slots with several rows."""
    chains: dict[int, _Chain] = {}
    for index, token in plan.draft_tokens.items():
        row = plan.rows[index]
        chain = chains.setdefault(row.slot, _Chain(row.start))
        chain.assumed.append(token)
    return chains


def _check_directory(path: str) -> None:
    """Raise ValueError unless the directory exists."""
    if not Path(path).is_dir():
        raise ValueError(f"{path} is no directory")


def _extend(value: int, token: int) -> int:
    return (value * 1_000_003 + token * 7_919 + 12_345) & _MASK
