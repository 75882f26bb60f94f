"""The model runner, which executes plans. Tokens and pages of every slot stay on the device, so plans name slots only.

A step writes each sampled token into its slot's token buffer. The next plan can therefore be executed before the host
has seen the result.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.ops import sampler_ops
from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.kernels.ops.lora import LoRARows
from tercet.kernels.ops.recurrent import Segments
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.oom import OomPolicy, SplitOnOom, again, release_cached
from tercet.scheduler.device.staging import Array
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.lora.adapters import StepAdapters
from tercet.scheduler.executor.media.audio import StepCross
from tercet.scheduler.executor.media.step_media import StepMedia
from tercet.scheduler.executor.sampling.draft_penalties import DraftTokens
from tercet.scheduler.executor.sampling.prompt_scorer import PromptScorer
from tercet.scheduler.executor.sampling.sampler import (
    Agree,
    LogprobsMode,
    Sampled,
    Sampler,
    SamplingOps,
    join_sampled,
)
from tercet.scheduler.executor.sampling.slot_grammars import ConstrainedRows, GrammarOutcome, SlotGrammars
from tercet.scheduler.executor.slot_tables import SlotTables, StepInputs
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.executor.step_output import StepOutput
from tercet.scheduler.executor.step_share import StepShare, WholeStep

ValuesT = TypeVar("ValuesT", Array, torch.Tensor)


class Model(Protocol):
    """The interface of a model."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens] at positions [tokens]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of any floating dtype for hidden states [rows, hidden]."""
        ...


class Replays(Protocol):
    """The interface of an object that replays captured steps."""

    def replay(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """Return [rows, hidden], valid until the next call; None if the step must run eagerly.

        The step is `adapted` if a row has an adapter.
        """
        ...

    def replay_sampling(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """Sample for the step that `replay` has just computed, and write each slot's token. Return int64 [rows].

        Return None if sampling must run eagerly.
        """
        ...

    def capture_next(self) -> bool:
        """Capture something between two steps. Return whether more is left to capture."""
        ...


class ModelRunner:
    """A model on one device, with its pool, its slots and its sampler.

    If the logits of all rows do not fit in memory, rows are sampled and scored in parts, after a call of `release`.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        backend: Callable[[], AttentionBackend],
        *,
        slots: int,
        context_length: int,
        vocab_size: int,
        device: torch.device,
        sampling_ops: SamplingOps = sampler_ops,
        grammars: SlotGrammars | None = None,
        adapters: StepAdapters | None = None,
        release: Callable[[], None] = release_cached,
        graphs: Callable[[SlotTables, Sampler, StepAdapters | None], Replays] | None = None,
        agree: Agree = lambda tokens: tokens,
        oom_policy: Callable[[str, Callable[[], None]], OomPolicy] = SplitOnOom,
        logprobs_mode: LogprobsMode = "raw",
        states: StatePool | None = None,
        media: StepMedia | None = None,
        share: StepShare = WholeStep(),
    ) -> None:
        """Create a runner. `graphs` creates the replays of its tables' steps; the pool must have spare pages.

        `oom_policy` creates the policy for rows that may not fit in memory, from the rows' name and `release`.
        """
        self._model = model
        self._pool = pool
        self._states = states
        self._media = media
        self._share = share
        self._backends = [backend() for _ in pool.groups]
        self._inits: list[SlotInit | None] = [None] * slots
        self._scored = np.zeros(slots, dtype=np.bool_)  # slots with prompt log-probabilities
        self._constrained = np.zeros(slots, dtype=np.bool_)  # slots with a grammar, of which rank 0 alone has matchers
        self._tables = SlotTables(
            slots,
            context_length + 1,
            page_size=pool.page_size,
            groups=len(pool.groups),
            device=device,
            spare_pages=pool.spare_pages,
        )
        self._sampler = Sampler(slots, vocab_size, device, sampling_ops, agree, logprobs_mode)
        self.graphs = None if graphs is None else graphs(self._tables, self._sampler, adapters)
        self._sampling_ops = sampling_ops
        self._grammars = grammars
        self._adapters = adapters
        self._release = release
        self._sampling = oom_policy("rows to sample", release)
        scoring = oom_policy("positions to score", release)
        self._scorer = PromptScorer(model.compute_logits, self._tables.read, sampling_ops, scoring)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepOutput:
        """Run one step, in the order of `Plan`. Return before an accelerator has finished it."""
        began, own = time.perf_counter(), self._share.of(plan)
        if self._adapters is not None:
            self._adapters.load(own.adapters)
            self._adapters.introduce(own.introduce)
        if self._media is not None:
            self._media.load(plan)
        if plan.introduce:
            self._introduce(plan.introduce)
        self._tables.update_pages(own.pages)
        self._pool.copy_pages(own.copies)
        segments = None if self._states is None else self._states.begin(own)
        output = self._compute(plan, own, segments) if plan.rows else StepOutput(plan, [], None, [])
        if self._media is not None and plan.encode:
            output.encoded = self._media.encode(plan, time.perf_counter() - began)
        return output

    def _compute(self, plan: Plan, own: Plan, segments: Segments | None) -> StepOutput:
        """Compute the rows of a plan, of which this rank's share is `own`."""
        if plan.draft_tokens:
            self._tables.assume(plan.rows, plan.draft_tokens)
        inputs = self._tables.gather(plan.rows)
        sampling_rows = inputs.sampling_rows
        slots = inputs.slots if len(sampling_rows) == len(inputs.slots) else inputs.slots[sampling_rows]
        assumed = [*map(plan.draft_tokens.get, sampling_rows)] if plan.draft_tokens else []
        # masks are filled during the forward pass
        constrained = self._grammars.begin(plan.step, slots, assumed) if self._grammars else None
        lora = None if self._adapters is None else self._adapters.rows(own.rows)
        replaced = cross = None
        if self._media is not None:
            inputs, replaced, cross = self._media.begin(plan.rows, inputs)
        scored = bool(self._scored[inputs.slots].any())
        forward = partial(self._forward, lora=lora, segments=segments, replaced=replaced, cross=cross)
        hidden = self._share.hidden(plan, own, inputs, self._tables.gather, forward, scored=scored)
        drafts = DraftTokens(slots.tolist(), assumed) if assumed and self._sampler.has_penalties(slots) else None
        sampled = self._sample(hidden, inputs, slots, constrained, drafts, adapted=lora is not None)
        inits = ((row, self._init(row.slot)) for row in plan.rows)
        prompts = self._scorer.score(hidden, inits) if scored else []
        if scored and self._media is not None:
            prompts = self._media.with_times(plan.rows, prompts)
        sampling = [plan.rows[index] for index in sampling_rows] if constrained is not None else []
        advance = None if constrained is None else partial(self._advance, constrained, sampling)
        return StepOutput(plan, sampling_rows, sampled, prompts, advance, self._pool.device)

    def close(self) -> None:
        """End what is being encoded. No step follows."""
        if self._media is not None:
            self._media.close()

    def _introduce(self, inits: Sequence[SlotInit]) -> None:
        shifts = [0] * len(inits) if self._media is None else self._media.introduce(inits)
        for init, shift in zip(inits, shifts, strict=True):
            self._inits[init.slot] = init
            self._scored[init.slot] = init.prompt_logprobs
            self._constrained[init.slot] = init.sampling.grammar is not None
            self._tables.introduce(init, shift)
        again(partial(self._sampler.introduce, inits), self._release)
        if self._grammars is not None:
            self._grammars.introduce(inits)

    def _forward(
        self,
        inputs: StepInputs,
        lora: LoRARows | None,
        segments: Segments | None,
        replaced: ReplacedEmbeddings | None,
        cross: StepCross | None,
    ) -> torch.Tensor:
        """Return the hidden states [tokens, hidden]."""
        if self.graphs is not None and (hidden := self.graphs.replay(inputs, adapted=lora is not None)) is not None:
            return hidden
        ids = self._tables.ids_at(inputs.places)
        batch = ForwardBatch.planned(
            input_ids=ids,
            positions=inputs.positions,
            sample_index=inputs.sample_index,
            attention=inputs.attention,
            backends=self._backends,
            pool=self._pool,
            lora=lora,
            chained=inputs.chained,
            states=self._states,
            segments=segments,
            replaced=replaced,
            cross=cross,
        )
        return self._model(ids, inputs.positions, batch)

    def _sample(
        self,
        hidden: torch.Tensor,
        inputs: StepInputs,
        slots: Array,
        constrained: ConstrainedRows | None,
        drafts: DraftTokens | None,
        *,
        adapted: bool,
    ) -> Sampled | None:
        """Sample for the slots of the sampling rows, and write each slot's new token."""
        if not len(slots):
            return None
        if self.graphs is not None and not self._constrained[slots].any():
            tokens = self.graphs.replay_sampling(inputs, adapted=adapted)
            if tokens is not None:
                return Sampled(tokens, None)
        run = partial(self._sample_rows, hidden, inputs, slots, constrained, drafts)
        sampled = join_sampled(self._sampling(run, slice(0, len(slots))))
        if drafts is not None:
            self._sampler.count_accepted(slots, sampled.tokens, drafts)
        self._tables.write_sampled(inputs.sampled_places, sampled.tokens)
        return sampled

    def _sample_rows(
        self,
        hidden: torch.Tensor,
        inputs: StepInputs,
        slots: Array,
        constrained: ConstrainedRows | None,
        drafts: DraftTokens | None,
        rows: slice,
    ) -> Sampled:
        """Sample for some of the sampling rows."""
        if len(slots) < len(hidden):
            hidden = hidden[inputs.sample_index]
        logits = self._model.compute_logits(_some(hidden, rows))
        slots, positions = _some(slots, rows), _some(inputs.output_positions, rows)
        if self._media is not None:
            self._media.restrict(logits, slots, positions, self._tables.read)
        return self._sampler.sample(
            logits,
            slots,
            positions,
            None if constrained is None else lambda: constrained.masks()[rows],
            sent_positions=_some(inputs.sent_positions, rows),
            drafts=drafts,
            first=rows.start,
        )

    @torch.inference_mode()
    def _advance(self, constrained: ConstrainedRows, rows: Sequence[Row], tokens: Sequence[int]) -> GrammarOutcome:
        """Advance the grammars by the sampled tokens, and write forced tokens into the slots.

        This runs when the result is requested. No later plan names these slots yet: the core waits for the result.
        """
        lengths = [row.start + row.count + 1 for row in rows]
        outcome = constrained.advance(tokens, lengths)
        for index, forced in outcome.forced.items():
            self.force(rows[index].slot, lengths[index], forced)
        return outcome

    @torch.inference_mode()
    def force(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Append tokens from position `first` on that were not sampled, before a plan names the slot again."""
        self._tables.append(slot, first, tokens)
        self._sampler.count(slot, tokens)

    def _init(self, slot: int) -> SlotInit:
        init = self._inits[slot]
        if init is None:
            raise ValueError(f"slot {slot} was never introduced")
        return init


def _some(values: ValuesT, rows: slice) -> ValuesT:
    """Return some rows of an array or a tensor; itself if these are all its rows."""
    return values if rows == slice(0, len(values)) else values[rows]
