"""`ModelRunner`: executes plans. It keeps every slot's tokens and pages on the device, so that a plan names only slots.

A sampled token is written into its slot's token buffer by the step that sampled it. The next plan can therefore be
executed before anybody on the host has seen the result.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch
from tercet.kernels.ops import sampling
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.forward_batch import ForwardBatch, ForwardMode
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.sampler import Sampled, Sampler, SamplingOps
from tercet.scheduler.executor.slot_grammars import GuidedRows, Outcome, SlotGrammars
from tercet.scheduler.executor.step_output import PromptLogprobs, StepOutput

_PROMPT_CHUNK = 256
"""Prompt positions whose logits are held at once."""


class Model(Protocol):
    """What the runner asks of a model."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[tokens], [tokens] -> [tokens, hidden]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        ...


class ModelRunner:
    """One model on one device, with its pool, its slots and its sampler."""

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
        sampling_ops: SamplingOps = sampling,
        grammars: SlotGrammars | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._backends = [backend() for _ in pool.groups]
        self._device = device
        self._inits: list[SlotInit | None] = [None] * slots
        self._tokens = torch.zeros(slots, context_length + 1, dtype=torch.int32, device=device)
        pages = -(-(context_length + 1) // pool.shape.page_size)
        self._page_tables = [torch.zeros(slots, pages, dtype=torch.int32, device=device) for _ in pool.groups]
        self._sampler = Sampler(slots, vocab_size, device, sampling_ops)
        self._grammars = grammars

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepOutput:
        """Run one step: introduce, pages, copies, rows. Returns before an accelerator has finished it."""
        self._introduce(plan.introduce)
        self._update_pages(plan.pages)
        self._pool.copy_pages(plan.copies)
        sampling_rows = [index for index, row in enumerate(plan.rows) if row.sample]
        rows = [plan.rows[index] for index in sampling_rows]
        guided = self._grammars.begin([row.slot for row in rows]) if self._grammars else None  # fills masks meanwhile
        batch = self._batch(plan.rows, sampling_rows)
        hidden = self._model(batch.input_ids, batch.positions, batch)
        sampled = self._sample(hidden, batch, rows, guided)
        settle = None if guided is None else partial(self._settle, guided, rows)
        return StepOutput(plan, sampling_rows, sampled, self._prompt_logprobs(hidden, plan.rows), settle)

    def _introduce(self, inits: Sequence[SlotInit]) -> None:
        for init in inits:
            self._inits[init.slot] = init
            tokens = torch.frombuffer(bytearray(init.tokens), dtype=torch.int32)
            self._tokens[init.slot, : len(tokens)] = tokens.to(self._device)
        self._sampler.introduce(inits)
        if self._grammars is not None:
            self._grammars.introduce(inits)

    def _update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """All updates of a group in one write; of two for the same entry, the later one holds."""
        for group, table in enumerate(self._page_tables):
            entries: dict[tuple[int, int], int] = {}
            for update in updates:
                for offset, page in enumerate(update.pages[group]):
                    entries[update.slot, update.first + offset] = page
            if entries:
                index = self._tensor([*entries])
                table[index[:, 0], index[:, 1]] = self._tensor([*entries.values()]).int()

    def _batch(self, rows: Sequence[Row], sampling_rows: Sequence[int]) -> ForwardBatch:
        """Gather what the rows compute."""
        counts = [row.count for row in rows]
        ends = [row.start + row.count for row in rows]
        tokens = sum(counts)
        slots, starts, lengths, kv_lens = self._tensor(
            [[row.slot for row in rows], [row.start for row in rows], counts, ends]
        )
        query_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        row_of = torch.arange(len(rows), device=self._device).repeat_interleave(lengths, output_size=tokens)
        positions = torch.arange(tokens, device=self._device) + (starts - query_start[:-1])[row_of]
        page_size = self._pool.shape.page_size
        pages = -(-max(ends) // page_size)
        attention = []
        for table, backend in zip(self._page_tables, self._backends, strict=True):
            page_table = table[:, :pages][slots]
            slot_mapping = page_table[row_of, positions // page_size].long() * page_size + positions % page_size
            group = AttentionBatch(
                query_start=query_start.int(),
                kv_lens=kv_lens.int(),
                page_table=page_table,
                slot_mapping=slot_mapping,
                page_size=page_size,
                host_query_lens=counts,
                host_kv_lens=ends,
            )
            backend.plan(group)
            attention.append(group)
        return ForwardBatch(
            mode=ForwardMode.of(counts),
            input_ids=self._tokens[slots[row_of], positions].long(),
            positions=positions,
            sample_index=query_start[1:][self._tensor(sampling_rows)] - 1,
            attention=attention,
            backends=self._backends,
            pool=self._pool,
        )

    def _sample(
        self, hidden: torch.Tensor, batch: ForwardBatch, rows: Sequence[Row], guided: GuidedRows | None
    ) -> Sampled | None:
        """Sample for `rows`, all of which want it, and give each slot its new token."""
        if not rows:
            return None
        logits = self._model.compute_logits(hidden[batch.sample_index])
        slots = [row.slot for row in rows]
        ends = [row.start + row.count for row in rows]
        positions = [end - self._init(slot).prompt_tokens for slot, end in zip(slots, ends, strict=True)]
        sampled = self._sampler.sample(logits, slots, positions, None if guided is None else guided.masks.result)
        index = self._tensor([slots, ends])
        self._tokens[index[0], index[1]] = sampled.tokens.clamp(min=0).int()  # -1 must not reach an embedding
        return sampled

    @torch.inference_mode()
    def _settle(self, guided: GuidedRows, rows: Sequence[Row], tokens: Sequence[int]) -> Outcome:
        """Let matchers see the tokens, and give each slot those that are forced to follow.

        Runs where the result is asked for. No later plan names these slots yet: the core waits for the result.
        """
        lengths = [row.start + row.count + 1 for row in rows]
        outcome = guided.settle(tokens, lengths)
        for index, forced in outcome.forced.items():
            slot, length = rows[index].slot, lengths[index]
            self._tokens[slot, length : length + len(forced)] = self._tensor(forced).int()
            self._sampler.count(slot, forced)
        return outcome

    def _prompt_logprobs(self, hidden: torch.Tensor, rows: Sequence[Row]) -> list[PromptLogprobs]:
        """Of each row that wants them: of the prompt tokens at (start, start + count], a chunk at a time."""
        results = []
        first = 0
        for index, row in enumerate(rows):
            init = self._init(row.slot)
            last = min(row.start + row.count, init.prompt_tokens - 1)
            if init.prompt_logprobs and last > row.start:
                states = hidden[first : first + last - row.start]
                targets = self._tokens[row.slot, row.start + 1 : last + 1].long()
                results.append(self._score(index, states, targets, max(init.top_logprobs, 0)))
            first += row.count
        return results

    def _score(self, index: int, states: torch.Tensor, targets: torch.Tensor, top: int) -> PromptLogprobs:
        parts = []
        for first in range(0, len(targets), _PROMPT_CHUNK):
            chunk = slice(first, first + _PROMPT_CHUNK)
            scored = token_logprobs(self._model.compute_logits(states[chunk]), targets[chunk], top)
            parts.append([tensor.cpu() for tensor in scored])
        chosen, top_ids, top_logprobs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return PromptLogprobs(index, chosen, top_ids, top_logprobs)

    def _init(self, slot: int) -> SlotInit:
        init = self._inits[slot]
        if init is None:
            raise ValueError(f"slot {slot} was never introduced")
        return init

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device)
