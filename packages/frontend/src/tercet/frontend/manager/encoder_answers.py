"""Answers of encoders: vectors of inputs, and embeddings of images and sounds."""

import logging
import math

from tercet.frontend.manager.embedding_state import EmbeddingState, unpack_vectors
from tercet.frontend.manager.encoding_state import EncodingState
from tercet.frontend.manager.req_state import ACCEPTED, Verdict
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.messages.encodings import EncodedMedia
from tercet.protocol.messages.messages import BatchEmbeddingOutput

logger = logging.getLogger(__name__)


class EncoderAnswers:
    """Handler of vectors and embeddings, on the event loop's thread."""

    def __init__(self, requests: RequestTable) -> None:
        self._states = requests.states
        self._counters = requests.counters
        self._clock = requests.clock
        self._dispatcher = requests.dispatcher

    def handle(self, source: str, answer: BatchEmbeddingOutput | EncodedMedia, frames: tuple[memoryview, ...]) -> None:
        """Give each input its answer. An answer that does not fit is dropped."""
        take = self._take_vectors if isinstance(answer, BatchEmbeddingOutput) else self._take_embeddings
        try:
            take(answer, frames)  # type: ignore[arg-type]
        except ValueError as error:
            logger.error("%s: invalid answer of an encoder, dropping it: %s", source, error)

    def _take_vectors(self, batch: BatchEmbeddingOutput, frames: tuple[memoryview, ...]) -> None:
        rows = list(unpack_vectors(batch, frames))
        now = self._clock()
        for rid, attempt, vector, finish, queue_time in rows:
            state = self._states.get(rid)
            if isinstance(state, EmbeddingState):
                verdict = state.accept(attempt, vector, finish)
                if verdict is ACCEPTED:
                    measures = self._counters.models[state.model.base]
                    measures.observe_first_output(state, None if math.isnan(queue_time) else queue_time, now)
                    measures.observe_request(state, now)
                self._follow(state, verdict, now)

    def _take_embeddings(self, answer: EncodedMedia, frames: tuple[memoryview, ...]) -> None:
        state = self._states.get(answer.rid)
        if isinstance(state, EncodingState):
            self._follow(state, state.accept(answer, frames), self._clock())

    def _follow(self, state: RequestState, verdict: Verdict, now: float) -> None:
        if verdict is Verdict.ABORTED:
            self._dispatcher.redispatch(state, now, Cause.ABORTED)
        elif verdict is ACCEPTED:
            self._dispatcher.release_load(state)
            if state.exclusive:
                self._dispatcher.retry(now)
