"""`Engine`: a model in a Python program, without HTTP. It sends the same messages as a frontend."""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NotRequired, Self, TypedDict, overload

import orjson

from tercet.frontend.api.sglang.generate_writer import GenerateWriter
from tercet.frontend.engine.client import EngineError, OutputStream
from tercet.frontend.engine.processes import EngineProcesses, MakeParts, offline_parts
from tercet.frontend.engine.requests import Ids, Sampling, Texts, add_prompt_note, to_chat, to_inputs, to_requests
from tercet.frontend.http.loop_turns import result_of
from tercet.frontend.manager.embedding_state import unpack_vector
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.supervisor.options import FrontendOptions, SchedulerOptions, ServeConfig, ServeOptions
from tercet.protocol.system.log_lines import LogLevel

__all__ = ["Completion", "Embedding", "Engine", "EngineError"]

TokenScore = tuple[float | None, int, str | None]
"""Log-probability, token id, and the token's text with `return_text_in_logprobs`. It is a list: JSON has no tuples."""


class Finish(TypedDict):
    """Reason for the end of a choice."""

    type: str
    matched: int | str | None
    """The token id or the stop string that ended it."""
    length: NotRequired[int]
    """Number of output tokens, if that ended it."""


class MetaInfo(TypedDict):
    """Facts about an answer. The log-probabilities are there with `return_logprob`."""

    id: str
    finish_reason: Finish | None
    """None while a stream goes on."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    """Fingerprint of the weights that computed its last token."""
    e2e_latency: NotRequired[float]
    """Seconds until the last token, once the answer is complete."""
    input_token_logprobs: NotRequired[list[TokenScore]]
    input_top_logprobs: NotRequired[list[list[TokenScore] | None]]
    output_token_logprobs: NotRequired[list[TokenScore]]
    output_top_logprobs: NotRequired[list[list[TokenScore] | None]]


class Completion(TypedDict):
    """A response of /generate."""

    index: int
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class EmbeddingInfo(TypedDict):
    """Facts about a vector."""

    prompt_tokens: int


class Embedding(TypedDict):
    """The vector of a text."""

    embedding: list[float]
    meta_info: EmbeddingInfo


Choices = Completion | Any
"""Completion, or a list of them if the sampling parameters have n > 1, which types do not tell."""


class Engine:
    """A scheduler and a detokenizer as child processes, and their client. Thread-safe; best used in a `with`.

    `lora` maps names of adapters to directories or names at Hugging Face. `options` are the fields of
    `SchedulerOptions`; sizes may also be numbers of bytes. Dead parts are restarted, and their requests continue. The
    parts end with `shutdown`, with the garbage collection of the engine, and with the process. A fork must create an
    engine of its own. Raises ConfigError, TypeError for an unknown option, and EngineError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "embedded",
        *,
        lora: Mapping[str, str | os.PathLike[str]] | None = None,
        log_level: LogLevel = "warning",
        startup_timeout: float = 600.0,
        make_parts: MakeParts = offline_parts,
        **options: Any,
    ) -> None:
        serve = ServeOptions(log_level=log_level, startup_timeout=startup_timeout)
        if isinstance(size := options.get("kv_cache_bytes"), int):
            options["kv_cache_bytes"] = str(size)
        adapters = FrontendOptions(lora=tuple(f"{name}={os.fspath(path)}" for name, path in (lora or {}).items()))
        scheduler = SchedulerOptions(**options)
        config = ServeConfig(model=os.fspath(model), serve=serve, frontend=adapters, scheduler=scheduler)
        self._parts = EngineProcesses(config, make_parts)
        self._client = self._parts.client
        self._model = self._parts.model
        self._lora = self._parts.lora
        self.supervisor = self._parts.supervisor
        self._finalizer = weakref.finalize(self, self._parts.close_in_background)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    @overload
    def generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> Generator[Completion, None, None]: ...

    @overload
    def generate(
        self, prompt: str, sampling_params: Sampling | None = None, *, stream: Literal[False] = False, **options: Any
    ) -> Choices: ...

    @overload
    def generate(
        self,
        prompt: Iterable[str],
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> list[Choices]: ...

    @overload
    def generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any: ...

    def generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Return the answer to a prompt, or a list of answers for a list; with n > 1 each answer is a list of choices.

        `stream` returns an iterator over growing answers, one choice at a time (`index` tells which). It takes one
        prompt; at most 512 streams run at a time. Parameters are those of /generate; `lora_path` is the name of an
        adapter, or a list of them for several prompts, and `image_data` the image of a prompt, its images in a list,
        or a list of both for several prompts. Arrays and series are accepted as lists. Raises ValueError for
        invalid values, TypeError for an unknown option, and ApiError for requests that fail, with a note that names
        the prompt if there are several.
        """
        requests, single = to_requests(prompt, input_ids, sampling_params, options, self._model, self._lora)
        if stream:
            return self._iterate(self._stream(requests))
        answers = self._client.wait(partial(self._gather, requests, single=single))
        return answers[0] if single else answers

    @overload
    async def async_generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncGenerator[Completion, None]: ...

    @overload
    async def async_generate(
        self, prompt: str, sampling_params: Sampling | None = None, *, stream: Literal[False] = False, **options: Any
    ) -> Choices: ...

    @overload
    async def async_generate(
        self,
        prompt: Iterable[str],
        sampling_params: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> list[Choices]: ...

    @overload
    async def async_generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any: ...

    async def async_generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Run `generate` on the caller's event loop: await it, and iterate over a `stream` with `async for`."""
        requests, single = to_requests(prompt, input_ids, sampling_params, options, self._model, self._lora)
        if stream:
            return self._aiterate(self._stream(requests))
        work = partial(self._gather, requests, single=single)
        answers = await asyncio.wrap_future(self._client.run(work))
        return answers[0] if single else answers

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a chat, for `generate(input_ids=...)`.

        Messages and tools are those of /v1/chat/completions. Text of users never becomes a special token. Raises
        ValueError and ApiError.
        """
        prompt = to_chat(messages, tools, self._model, add_generation_prompt=add_generation_prompt)
        return self._client.wait(partial(self._model.tokenize, prompt, must_fit=False))

    @overload
    def encode(self, prompt: str, *, truncate: int | None = None) -> Embedding: ...  # type: ignore[overload-overlap]

    @overload
    def encode(self, prompt: Iterable[str], *, truncate: int | None = None) -> list[Embedding]: ...

    def encode(self, prompt: Texts, *, truncate: int | None = None) -> Embedding | list[Embedding]:
        """Return the vector of a text, or a list of them for a list.

        A vector is `embedding`, with `prompt_tokens` in `meta_info`. The model must be one that embeds. Texts that are
        too long are refused, or cut after `truncate` tokens; -1 is the model's limit. Raises ValueError and ApiError.
        """
        request, single = to_inputs(prompt, self._model, truncate)
        batch = self._client.wait(partial(self._client.embed, request))
        vectors: list[Embedding] = [
            {"embedding": list(unpack_vector(state.vector)), "meta_info": {"prompt_tokens": state.prompt_tokens}}
            for state in batch.states
        ]
        return vectors[0] if single else vectors

    def update_weights_from_disk(self, path: str | os.PathLike[str]) -> None:
        """Replace the weights by those of a directory. Requests that have begun finish with the old ones.

        Raises ApiError for weights that do not fit the model.
        """
        self._client.wait(partial(self._client.update_weights, str(Path(path).absolute())))

    def shutdown(self) -> None:
        """Stop the parts and abort running requests, which raise EngineError. A second call has no effect."""
        self._finalizer.detach()
        self._parts.close()

    async def _gather(self, requests: Sequence[GenerateRequest], *, single: bool) -> list[Any]:
        """Return every answer; when one request fails, abort the others."""
        tasks = [asyncio.ensure_future(self._generate_one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            failed = next((place for place, task in enumerate(tasks) if _raised(task, error)), None)
            if failed is not None and not single:
                add_prompt_note(error, failed)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _generate_one(self, request: GenerateRequest) -> Any:
        generation, choices = await self._client.generate(request)
        return orjson.loads(result_of(GenerateWriter().full_response(generation, choices)))

    def _stream(self, requests: Sequence[GenerateRequest]) -> OutputStream[Completion]:
        if len(requests) != 1:
            raise ValueError("one prompt can be streamed at a time")
        return OutputStream(self._stream_answers(requests[0]))

    async def _stream_answers(self, request: GenerateRequest) -> AsyncGenerator[Completion, None]:
        form = GenerateWriter()
        async with contextlib.aclosing(self._client.stream(request)) as arrivals:
            async for generation, choice in arrivals:
                yield orjson.loads(result_of(form.full_response(generation, [choice])))

    def _iterate(self, answers: OutputStream[Completion]) -> Generator[Completion, None, None]:
        try:
            while (answer := self._client.wait(answers.next)) is not None:
                yield answer
        finally:
            self._close_stream(answers)

    async def _aiterate(self, answers: OutputStream[Completion]) -> AsyncGenerator[Completion, None]:
        try:
            while (answer := await asyncio.wrap_future(self._client.run(answers.next))) is not None:
                yield answer
        finally:
            self._close_stream(answers)

    def _close_stream(self, answers: OutputStream[Completion]) -> None:
        """Close a stream without waiting, because an iterator may be garbage-collected in any thread."""
        with contextlib.suppress(EngineError):
            self._client.run(answers.close)


def _raised(task: asyncio.Task[Any], error: BaseException) -> bool:
    return task.done() and not task.cancelled() and task.exception() is error
