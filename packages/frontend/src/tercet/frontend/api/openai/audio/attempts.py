"""Transcripts whose windows are generated again at higher temperatures where they fail, and the times of their tokens.

The limits are those of OpenAI's Whisper (https://arxiv.org/abs/2212.04356, section 4.5).
"""

from collections.abc import Sequence
from math import log
from statistics import fmean

from msgspec import structs

from tercet.frontend.api.generation_response import FinishedChoice, collect
from tercet.frontend.api.openai.audio.transcript_body import Outcome, compression_ratio
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import Transcript, TranscriptTokens
from tercet.protocol.messages.values import LogprobParams, unpack_floats

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MOST_COMPRESSION = 2.4
"""Compression ratio above which a text repeats itself."""
_LEAST_LOGPROB = -1.0
"""Mean log-probability below which a text is a guess."""
_NO_SPEECH = 0.6
"""Probability above which a window whose text is a guess has no speech."""


class Attempts:
    """Windows of one audio clip, each a request with the same `prompt`."""

    def __init__(
        self, manager: TokenizerManager, model: ServedModel, tokens: TranscriptTokens, prompt: Sequence[int]
    ) -> None:
        self._manager = manager
        self._model = model
        self._tokens = tokens
        self._prompt = prompt

    async def outcomes(self, work: Sequence[GenerateRequest], temperatures: Sequence[float]) -> list[Outcome]:
        """Return the outcome of each window at the first of some temperatures that gives a sound text, or at the last.

        Raises ApiError.
        """
        found: dict[int, Outcome] = {}
        left = list(range(len(work)))
        for temperature in temperatures:
            asked = [_at(work[each], temperature) for each in left]
            for each, choice in zip(left, await generated(self._manager, asked), strict=True):
                found[each] = Outcome(choice=choice, temperature=temperature)
            if temperature == temperatures[-1]:
                break
            if temperature == temperatures[0]:
                found |= await self._silent(work, found)
            left = [each for each in left if self._fails(found[each])]
            if not left:
                break
        return [found[each] for each in range(len(work))]

    async def with_times(self, work: Sequence[GenerateRequest], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return outcomes with the times of their tokens, which schedulers find in a second pass. Raises ApiError."""
        texts = [self._text(each)[: self._model.context - len(self._prompt) - 1] for each in outcomes]
        asked = [
            _asked(request, [*self._prompt, *ids], Transcript.TIMES, LogprobParams(prompt=True))
            for request, ids in zip(work, texts, strict=True)
            if ids
        ]
        answers = iter(await generated(self._manager, asked) if asked else [])
        return [
            structs.replace(each, times=_times(next(answers), len(each.token_ids))) if ids else each
            for each, ids in zip(outcomes, texts, strict=True)
        ]

    async def _silent(self, work: Sequence[GenerateRequest], found: dict[int, Outcome]) -> dict[int, Outcome]:
        """Return the outcomes of windows without speech, among those whose text is a guess."""
        token = self._tokens.no_speech
        guesses = [each for each, outcome in found.items() if outcome.token_ids and _is_guess(outcome)]
        if token is None or not guesses:
            return {}
        start = self._prompt[: self._prompt.index(self._tokens.start) + 1]
        asked = [_asked(work[each], start, Transcript.SPEECH, LogprobParams()) for each in guesses]
        answers = [Outcome(choice=each, temperature=0.0) for each in await generated(self._manager, asked)]
        return {
            each: structs.replace(found[each], silent=True)
            for each, answer in zip(guesses, answers, strict=True)
            if [*answer.token_ids] == [token] and answer.logprobs[0] > log(_NO_SPEECH)
        }

    def _fails(self, outcome: Outcome) -> bool:
        """Return whether a text repeats itself or is a guess."""
        if outcome.silent or not outcome.token_ids:
            return False
        ids = [token for token in self._text(outcome) if token < self._tokens.first_timestamp]
        text = self._model.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return compression_ratio(text) > _MOST_COMPRESSION or _is_guess(outcome)

    def _text(self, outcome: Outcome) -> list[int]:
        """Return the tokens of an outcome without the one that ended it."""
        ids = [*outcome.token_ids]
        return ids[:-1] if ids and ids[-1] in self._model.limits.eos_token_ids else ids


async def generated(manager: TokenizerManager, work: Sequence[GenerateRequest]) -> list[FinishedChoice]:
    """Return the answers to requests when all have ended. Raises ApiError."""
    generation = await manager.submit(work)
    try:
        return await collect(generation, generation.arrivals())
    finally:
        manager.release(generation)


def _at(request: GenerateRequest, temperature: float) -> GenerateRequest:
    options = structs.replace(request.options, sampling={"temperature": temperature})
    return structs.replace(request, options=options)


def _asked(
    request: GenerateRequest, prompt: Sequence[int], transcript: Transcript, logprobs: LogprobParams
) -> GenerateRequest:
    """Return a request for one token about the audio of another request."""
    options = structs.replace(request.options, sampling={"temperature": 0.0}, max_tokens=1, logprobs=logprobs)
    assert request.audio is not None
    audio = structs.replace(request.audio, transcript=transcript)
    return structs.replace(request, prompt=TokenPrompt([*prompt], param="file"), options=options, audio=audio)


def _is_guess(outcome: Outcome) -> bool:
    return fmean(outcome.logprobs) < _LEAST_LOGPROB


def _times(choice: FinishedChoice, count: int) -> list[float]:
    """Return the times of `count` tokens of which the last may have none: it ends with the one before it."""
    scores = choice.state.prompt_logprobs
    times = [] if scores is None else [*unpack_floats(scores.times)]
    return [*times, *[times[-1] if times else 0.0] * (count - len(times))]
