"""Tokens that transcripts may have next, by the rules of Whisper: logits of all others become -inf."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tercet.protocol.messages.audio import Transcript, TranscriptTokens
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.device.staging import Array
from tercet.scheduler.models.audio.audio_model import TranscriptRules

_NEVER = float("-inf")
_MOST_TIMES = 65_536
"""More than the tokens of time of any vocabulary."""
Tokens = Callable[[int, int, int], torch.Tensor]
"""Returns tokens [first, last) of a slot: int64, on the device."""


class SlotTranscripts:
    """The kind of output of each slot. A slot without audio has no rules."""

    def __init__(self, rules: TranscriptRules, tokens: TranscriptTokens, slots: int, device: torch.device) -> None:
        self._tokens = tokens
        self._rules = rules
        self._times = torch.arange(_MOST_TIMES, device=device)
        self._kinds: list[Transcript | None] = [None] * slots
        self._prompts = [0] * slots
        self._suppressed, self._first, self._languages = (
            torch.tensor(sorted(ids), dtype=torch.int64, device=device)
            for ids in (rules.suppressed, rules.suppressed_first, tokens.languages.values())
        )

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Note the kinds of choices that take slots."""
        for init in inits:
            self._kinds[init.slot] = None if init.audio is None else init.audio.transcript
            self._prompts[init.slot] = init.prompt_tokens

    def restrict(self, logits: torch.Tensor, slots: Array, positions: Array, known: Tokens) -> None:
        """Restrict logits [rows, vocab], in place, of tokens at these output positions."""
        for row, (slot, position) in enumerate(zip(slots.tolist(), np.asarray(positions).tolist(), strict=True)):
            match self._kinds[slot]:
                case Transcript.TEXT:
                    self._suppress(logits[row], position)
                case Transcript.TIMESTAMPS:
                    self._suppress(logits[row], position)
                    first = self._prompts[slot]
                    self._pair_timestamps(logits[row], known(slot, first, first + position))
                case Transcript.LANGUAGE:
                    allowed = logits[row][self._languages]
                    logits[row].fill_(_NEVER)[self._languages] = allowed

    def _suppress(self, logits: torch.Tensor, position: int) -> None:
        logits[self._suppressed] = _NEVER
        if position == 0:
            logits[self._first] = _NEVER

    def _pair_timestamps(self, logits: torch.Tensor, said: torch.Tensor) -> None:
        """Let tokens of time begin and end each segment, in order, and begin or end one where time is likelier than any
        other token. Nothing waits for the device.
        """
        first, most = self._tokens.first_timestamp, self._rules.most_initial
        others, times = logits[:first], logits[first:]
        logits[self._tokens.no_timestamps] = _NEVER
        if not len(said):
            others.fill_(_NEVER)
            if most is not None:
                times[most + 1 :] = _NEVER
            return
        ended = said[-1] >= first
        begun = said[-2] >= first if len(said) > 1 else torch.ones_like(ended)
        opens = ended & ~begun  # the last token ended a segment: another begins, or the transcript ends
        earliest = torch.where(said >= first, said - first, -1).max() + (~opens).long()
        times.masked_fill_((ended & begun) | (self._times[: len(times)] < earliest), _NEVER)
        logits[: self._rules.end] += _never_if(opens)
        others += _never_if(times.float().logsumexp(0) > others.max().float())


def _never_if(condition: torch.Tensor) -> torch.Tensor:
    """Return -inf or 0, without reading the condition."""
    return torch.where(condition, _NEVER, 0.0)
