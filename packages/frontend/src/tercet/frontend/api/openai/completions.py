"""The /v1/completions endpoint."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.generation_response import FinishedChoice, respond
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.openai.logprobs import (
    COMPLETION_FIELDS,
    CompletionLogprobs,
    Members,
    echo_logprobs,
    joined,
    prompt_logprob_steps,
    sliced,
)
from tercet.frontend.api.openai.stop_reason import stop_fields
from tercet.frontend.api.openai.structured_schema import constraint_of
from tercet.frontend.api.openai.usage import chunk_suffix, usage
from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.http.loop_turns import Steps, result_of
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import DONE, event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState
from tercet.frontend.manager.request import GenerateRequest, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.fill_middle import FillFormat, fill_format
from tercet.frontend.model.prompts import TextPrompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.protocol.messages.values import FinishReason, LogprobParams, Logprobs, unpack_floats, unpack_ints

_DEFAULT_MAX_TOKENS = 16


class OpenAIServingCompletion:
    """OpenAI's Completions endpoint."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/completions", self.create)]

    async def create(self, request: Request) -> Response:
        """Generate completions."""
        body = await read_model(request, CompletionRequest, self._body_limit)
        model = await self._manager.adapters.model(body.model)
        work = to_generate_requests(body, model)
        rid = self._manager.new_id()
        writer = CompletionWriter(rid, body, model)
        return await respond(request, self._manager, work, writer, stream=bool(body.stream), rid=rid)


def to_generate_requests(body: CompletionRequest, model: ServedModel) -> list[GenerateRequest]:
    """Return one request for each prompt. Raises BadRequestError."""
    if body.echo and model.limits.encoder is not None:
        message = "The encoder of this model reads the prompt, which the answer does not continue."
        raise UnsupportedParameterError(message, param="echo")
    request = _without_prompt(body, model)
    if not body.suffix:
        return [msgspec.structs.replace(request, prompt=prompt) for prompt in body.prompts()]
    gap = fill_format(model.tokens.added)
    if gap is None:
        raise UnsupportedParameterError("This model has no tokens to fill in a gap with.", param="suffix")
    ends = [model.tokens.added[token] for token in gap.ends if token in model.tokens.added]
    stops = [*request.options.stop_token_ids, *ends]
    options = msgspec.structs.replace(request.options, stop_token_ids=stops)
    return [
        msgspec.structs.replace(request, prompt=_with_gap(prompt, body.suffix, gap), options=options)
        for prompt in body.prompts()
    ]


def _with_gap(prompt: TextPrompt | TokenPrompt, suffix: str, gap: FillFormat) -> TextPrompt:
    assert isinstance(prompt, TextPrompt)  # guaranteed by the schema
    return TextPrompt(gap.text(prompt.text, suffix), prompt.add_special_tokens, prompt.param)


def _without_prompt(body: CompletionRequest, model: ServedModel) -> GenerateRequest:
    """Return the common part of the requests of all prompts."""
    constraint = constraint_of(body)
    return GenerateRequest(
        model=model.base,
        lora=model.lora,
        prompt=TextPrompt(""),
        options=body.options(
            model.files.defaults,
            max_tokens=body.max_tokens,
            logprobs=_logprobs(body),
            param_names=ParamNames(
                n="best_of" if body.picks_best else "n",
                logprobs="prompt_logprobs" if body.logprobs is None else "logprobs",
                grammar=constraint.param if constraint else "",
            ),
        ),
        default_tokens=_DEFAULT_MAX_TOKENS,
        shows_logprobs=body.shows_logprobs,
        grammar=to_grammar(constraint, model.tokens) if constraint else None,
    )


def _logprobs(body: CompletionRequest) -> LogprobParams | None:
    """Return the parameters for schedulers. One number of alternatives serves prompt and output."""
    if not (body.shows_logprobs or body.picks_best):
        return None
    scored = body.prompt_logprobs is not None or (bool(body.echo) and body.logprobs is not None)
    return LogprobParams(top=max(body.logprobs or 0, body.prompt_logprobs or 0), prompt=scored)


class _Echo(NamedTuple):
    """A prompt to echo, with the log-probabilities of its tokens."""

    text: str
    scores: dict[str, Members] | None


class CompletionWriter:
    """Writer of completions. The choice with index j of prompt i has number i * n + j."""

    def __init__(self, rid: str, body: CompletionRequest, model: ServedModel) -> None:
        self._model = model
        self._n = body.n or 1
        self._picks_best = body.picks_best
        self._echo = bool(body.echo)
        self._scores_only = body.max_tokens == 0
        self._top = body.logprobs
        self._prompt_top = body.prompt_logprobs
        self._has_ids = bool(body.return_token_ids)
        self._stop_token_ids = body.stop_token_ids
        self._tokens_sent = 0
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._head = {
            "id": f"cmpl-{rid}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": model.fingerprint,
        }
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._suffix = chunk_suffix(None, include_usage=body.include_usage)
        self._writers: dict[int, CompletionLogprobs] = {}
        self._started: set[int] = set()
        """Numbers of the choices that have appeared in a chunk."""
        self._prompts: dict[str, _Echo] = {}
        self._scored: dict[str, orjson.Fragment | None] = {}

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:
        """Return a chunk for each choice with new tokens."""
        chunks = b""
        for arrival in arrivals:
            update = arrival.update
            if self._continuous_usage:
                self._tokens_sent += len(update.token_ids)
                self._suffix = chunk_suffix(self._usage(generation, self._tokens_sent), include_usage=True)
            number = arrival.prompt * self._n + update.index
            first = number not in self._started
            if not (first or update.text or update.finish or self._top is not None or self._has_ids):
                continue
            state = generation.states[arrival.prompt]
            result_of(self.prepare(state))
            choice = self._choice(number, state, update.text, update.token_ids, update.logprobs, update.finish)
            if first:
                choice |= self._prompt_ids(state)
            chunks += self._prefix + orjson.dumps(choice) + self._suffix
        return chunks

    def end(self, generation: Generation) -> bytes:
        """Return the end of the stream, with a chunk of token counts on request."""
        if not self._include_usage:
            return DONE
        return event(orjson.dumps({**self._head, "choices": [], "usage": self._usage(generation)})) + DONE

    def prepare(self, state: ReqState) -> Steps[None]:
        """Write the echo of a prompt, once for all its choices."""
        if self._echo and state.rid not in self._prompts:
            ids = unpack_ints(state.prompt_ids)
            text, scores = self._prompt_text(state, ids), None
            if self._top is not None and state.prompt_logprobs is not None:
                names, specials = self._model.files.token_bytes, self._model.tokenizer.special_ids
                scores = yield from echo_logprobs(names, specials, ids, text, state.prompt_logprobs, self._top)
            self._prompts[state.rid] = _Echo(text, scores)

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return a `text_completion` object."""
        shown = _best(choices, self._n) if self._picks_best else choices
        rows = []
        for number, each in enumerate(shown):
            yield from self.prepare(each.state)
            scores = yield from self._score_steps(number, each)
            row = self._choice(number, each.state, each.text, each.token_ids, [], each.finish, scores)
            fields = yield from self._prompt_fields(each.state)
            rows.append(row | self._prompt_ids(each.state) | fields)
            yield
        return orjson.dumps({**self._head, "choices": rows, "usage": self._usage(generation)})

    def _usage(self, generation: Generation, output_tokens: int | None = None) -> dict[str, Any]:
        return usage(generation, 0 if self._scores_only else output_tokens)

    def _choice(
        self,
        number: int,
        state: ReqState,
        text: str,
        ids: Sequence[int],
        logprobs: list[Logprobs],
        finish: FinishReason | None,
        scores: dict[str, Members] | None = None,
    ) -> dict[str, Any]:
        """Return a choice for a chunk or a whole response. The first one of each number starts with the echo, if any.

        `scores` are the log-probabilities of its tokens, if they are written already.
        """
        echo = self._prompts[state.rid] if self._echo and number not in self._started else _Echo("", None)
        self._started.add(number)
        if self._scores_only:
            text, ids, logprobs = "", [], []
        token_fields = {"token_ids": list(ids)} if self._has_ids else {}
        if self._top is not None and scores is None:
            scores = result_of(self._scores(number, state, ids, logprobs))
        if scores is not None and echo.scores is not None:
            scores = {name: joined(echo.scores[name], values) for name, values in scores.items()}
        reason = finish.type.value if finish else None
        return {
            "index": number,
            "text": echo.text + text,
            "logprobs": scores and {name: values.fragment() for name, values in scores.items()},
            "finish_reason": "length" if reason and self._scores_only else reason,
            **stop_fields(finish, self._stop_token_ids),
            **token_fields,
        }

    def _score_steps(self, number: int, choice: FinishedChoice) -> Steps[dict[str, Members] | None]:
        """Write the log-probabilities of a whole choice, if requested."""
        if self._top is None:
            return None
        ids, logprobs = ([], []) if self._scores_only else (choice.token_ids, choice.logprobs)
        return (yield from self._scores(number, choice.state, ids, logprobs))

    def _scores(
        self, number: int, state: ReqState, ids: Sequence[int], logprobs: list[Logprobs]
    ) -> Steps[dict[str, Members]]:
        """Write the log-probabilities of the next tokens of a choice."""
        if number not in self._writers:
            hidden = self._model.tokenizer.special_ids if state.request.options.skip_special_tokens else frozenset()
            offset = len(self._prompts[state.rid].text) if self._echo else 0
            self._writers[number] = CompletionLogprobs(self._model.files.token_bytes, hidden, offset, self._top)
        written = {name: Members() for name in COMPLETION_FIELDS}
        for some, part in sliced(ids, logprobs):
            for name, values in self._writers[number].write(some, [part]).items():
                written[name].add(values)
            yield
        return written

    def _prompt_ids(self, state: ReqState) -> dict[str, list[int]]:
        """Return the prompt's token ids for the first chunk of a choice, on request."""
        return {"prompt_token_ids": list(unpack_ints(state.prompt_ids))} if self._has_ids else {}

    def _prompt_fields(self, state: ReqState) -> Steps[dict[str, orjson.Fragment | None]]:
        """Return the prompt's log-probabilities for a whole choice, on request.

        They are written once for each prompt.
        """
        if self._prompt_top is None:
            return {}
        if state.rid not in self._scored:
            names, ids = self._model.files.token_bytes, unpack_ints(state.prompt_ids)
            scores = yield from prompt_logprob_steps(names, ids, state.prompt_logprobs, self._prompt_top)
            self._scored[state.rid] = scores
        return {"prompt_logprobs": self._scored[state.rid]}

    def _prompt_text(self, state: ReqState, prompt_ids: Sequence[int]) -> str:
        prompt = state.request.prompt
        if isinstance(prompt, TextPrompt):
            return prompt.text
        tokenizer = self._model.tokenizer
        return tokenizer.decode([each for each in prompt_ids if tokenizer.has(each)], skip_special_tokens=False)


def _best(choices: list[FinishedChoice], n: int) -> list[FinishedChoice]:
    """Return the n choices of each prompt with the highest mean log-probability, best first."""
    by_prompt: dict[int, list[FinishedChoice]] = {}
    for each in choices:
        by_prompt.setdefault(each.prompt, []).append(each)
    return [each for candidates in by_prompt.values() for each in sorted(candidates, key=_likelihood, reverse=True)[:n]]


def _likelihood(choice: FinishedChoice) -> float:
    """Return the mean log-probability of the tokens."""
    scores = [score for part in choice.logprobs for score in unpack_floats(part.chosen)]
    return sum(scores) / len(scores) if scores else 0.0
