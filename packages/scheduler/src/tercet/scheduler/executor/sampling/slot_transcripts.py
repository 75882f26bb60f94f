"""Tokens that transcripts may have next, by the rules of Whisper: logits of all others become -inf."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tercet.protocol.messages.sound import Transcript, TranscriptTokens
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.device.staging import Array
from tercet.scheduler.models.sound.sound_model import TranscriptRules

_NEVER = float("-inf")
Tokens = Callable[[int, int, int], torch.Tensor]
"""Returns tokens [first, last) of a slot: int64, on the device."""


class SlotTranscripts:
    """The kind of output of each slot. A slot without sound has no rules."""

    def __init__(self, rules: TranscriptRules, tokens: TranscriptTokens, slots: int, device: torch.device) -> None:
        self._tokens = tokens
        self._rules = rules
        self._kinds: list[Transcript | None] = [None] * slots
        self._prompts = [0] * slots
        self._suppressed, self._first, self._languages = (
            torch.tensor(sorted(ids), dtype=torch.int64, device=device)
            for ids in (rules.suppressed, rules.suppressed_first, tokens.languages.values())
        )

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Note the kinds of choices that take slots."""
        for init in inits:
            self._kinds[init.slot] = None if init.sound is None else init.sound.transcript
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
        logits[self._tokens.no_timestamps] = _NEVER
        if not len(said):
            logits[:first] = _NEVER
            if most is not None:
                logits[first + most + 1 :] = _NEVER
        else:
            ended = said[-1] >= first
            begun = said[-2] >= first if len(said) > 1 else torch.ones_like(ended)
            opens = ended & ~begun  # the last token ended a segment: another begins, or the transcript ends
            latest = torch.where(said >= first, said, first - 1).max()
            ids = torch.arange(len(logits), device=logits.device)
            times = ids >= first
            early = times & (ids < latest + (~opens).long())
            logits.masked_fill_((ended & begun & times) | (opens & (ids < self._rules.end)) | early, _NEVER)
        scores = logits.float().log_softmax(0)
        likely = scores[first:].logsumexp(0) > scores[:first].max()
        logits[:first].masked_fill_(likely, _NEVER)
