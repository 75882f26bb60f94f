"""Images, audio and texts of steps, and their encoding beside the steps' rows."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tercet.kernels.ops.embedding import ReplacedEmbeddings
from tercet.scheduler.core.images import ALL_TOKENS
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.staging import Array
from tercet.scheduler.device.time_slices import TimeSlices
from tercet.scheduler.executor.media.audio import StepAudio, StepCross
from tercet.scheduler.executor.media.images import StepImages
from tercet.scheduler.executor.media.texts import StepTexts
from tercet.scheduler.executor.media.unread import Unread
from tercet.scheduler.executor.sampling.slot_transcripts import Tokens
from tercet.scheduler.executor.slot_tables import StepInputs
from tercet.scheduler.executor.step_output import PromptLogprobs

_SHARE = 0.5
"""Seconds of encoding for each second of a step's rows."""
_LEAST_SECONDS = 0.002
_ALONE_SECONDS = 0.02
"""Seconds of encoding in a step without rows, for which messages wait."""


class StepMedia:
    """Images, or audio or texts of a model's steps; None for the kind that it does not take."""

    def __init__(
        self,
        images: StepImages[Any] | None,
        encoder: StepAudio | StepTexts | None,
        *,
        sliced: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create it. If encoding is not `sliced`, as on an accelerator, a step encodes each whole."""
        self._images, self._encoder = images, encoder
        self._slices = TimeSlices(clock) if sliced else None
        self._clock = clock
        self._begun: Unread | None = None

    def load(self, plan: Plan) -> None:
        """Note the audio clips or texts that get places."""
        if self._encoder is not None:
            self._encoder.load(plan)

    def introduce(self, inits: Sequence[SlotInit]) -> list[int]:
        """Note the images, audio or texts of choices that take slots.

        Return the shift of each one's positions: see `SlotTables.introduce`.
        """
        if self._encoder is not None:
            self._encoder.introduce(inits)
        return [0 if self._images is None else self._images.introduce(init) for init in inits]

    def begin(
        self, rows: Sequence[Row], inputs: StepInputs
    ) -> tuple[StepInputs, ReplacedEmbeddings | None, StepCross | None]:
        """Return the inputs of a step as it needs them, the embeddings of its images, and its cross-attention."""
        replaced = None
        if self._images is not None:
            inputs, replaced = self._images.begin(rows, inputs)
        return inputs, replaced, None if self._encoder is None else self._encoder.begin(rows)

    def restrict(self, logits: torch.Tensor, slots: Array, positions: Array, known: Tokens) -> None:
        """See `SlotTranscripts.restrict`."""
        if self._encoder is not None:
            self._encoder.restrict(logits, slots, positions, known)

    def with_times(self, rows: Sequence[Row], prompts: list[PromptLogprobs]) -> list[PromptLogprobs]:
        """See `StepAudio.with_times`."""
        return self._encoder.with_times(rows, prompts) if isinstance(self._encoder, StepAudio) else prompts

    @torch.inference_mode()
    def encode(self, plan: Plan, spent: float) -> dict[int, int]:
        """Encode for a share of the seconds that a plan's rows have `spent`. Return `StepResult.encoded`."""
        end = self._clock() + (max(_LEAST_SECONDS, _SHARE * spent) if plan.rows else _ALONE_SECONDS)
        if self._begun is not None and self._begun.key not in {each.key for each in self._left(plan)}:
            self._cancel()
        while unread := self._begun or next(self._left(plan), None):
            self._begun = unread
            if not self._run(unread, end - self._clock()):
                break
            self._begun = None
            if self._slices is None or self._clock() >= end:
                break
        found = {slot: self._unread(slot, computed) for slot, computed in plan.encode.items()}
        return {slot: ALL_TOKENS if unread is None else unread.first for slot, unread in found.items()}

    def close(self) -> None:
        """End what has begun. Nothing is encoded after it."""
        if self._slices is not None:
            self._slices.close()

    def _cancel(self) -> None:
        """End what has begun: no choice needs it."""
        if self._slices is not None:
            self._slices.cancel()
        self._begun = None

    def _run(self, unread: Unread, seconds: float) -> bool:
        """Encode for so many seconds. Return whether it is done."""
        if self._slices is not None:
            return self._slices.run(torch.inference_mode()(unread.encode), seconds)
        unread.encode()
        return True

    def _left(self, plan: Plan) -> Iterator[Unread]:
        """Yield what can be encoded for the slots of a plan, in their order."""
        for slot, computed in plan.encode.items():
            unread = self._unread(slot, computed)
            if unread is not None and unread.held:
                yield unread

    def _unread(self, slot: int, computed: int) -> Unread | None:
        """Return what a slot cannot read yet after so many computed tokens."""
        if self._encoder is not None and (unread := self._encoder.unread(slot)) is not None:
            return unread
        return None if self._images is None else self._images.unread(slot, computed)


def step_media(
    images: StepImages[Any] | None, encoder: StepAudio | StepTexts | None, device: torch.device
) -> StepMedia | None:
    """Return the images, audio or texts of a model's steps; None if it takes none."""
    return None if images is None and encoder is None else StepMedia(images, encoder, sliced=device.type == "cpu")
