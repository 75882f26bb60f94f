"""`Engine`: a model in a Python program, without HTTP. Offline use is another client of the same messages."""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from tercet.frontend.api.sglang.generate_writer import GenerateWriter
from tercet.frontend.engine.client import EngineError, OutputStream
from tercet.frontend.engine.processes import EngineProcesses, MakeParts, offline_parts
from tercet.frontend.engine.requests import Ids, Sampling, Texts, note_prompt, to_chat, to_inputs, to_requests
from tercet.frontend.http.loop_turns import result_of
from tercet.frontend.manager.embedding_state import numbers
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.supervisor.options import FrontendOptions, LogLevel, SchedulerOptions, ServeConfig, ServeOptions

__all__ = ["Answer", "Engine", "EngineError"]

Answer = dict[str, Any]
"""What /generate answers: index, text, output_ids, meta_info."""


class Engine:
    """A scheduler and a detokenizer as child processes, and their client. Usable from any thread, best in a `with`.

    `lora` are adapters by name: directories, or names at Hugging Face. `options` are the fields of `SchedulerOptions`,
    sizes also as numbers of bytes. Dead parts are restarted, and their
    requests go on. The parts end with `shutdown`, when the engine is forgotten, and with the process; a fork of it has
    to make an engine of its own. Raises ConfigError, TypeError for an unknown option, and EngineError.
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
        self._forgotten = weakref.finalize(self, self._parts.close_elsewhere)
        self._forgotten.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """The answer to a prompt, or the list of them for a list; with n > 1 each is a list of choices.

        `stream` gives an iterator instead, over answers that grow, one choice at a time (`index` tells which).
        That takes one prompt, and of 512 streams that have begun one must end before another begins. Parameters are
        those of /generate, with `lora_path` for the name of an adapter, or for those of several prompts; arrays and
        series do for lists. Raises ValueError for what cannot be meant, TypeError for an option that is none, ApiError
        for what fails, with a note that tells which of several prompts it is about.
        """
        requests, single = to_requests(prompt, input_ids, sampling_params, options, self._model, self._lora)
        if stream:
            return self._iterate(self._stream(requests, options))
        answers = self._client.wait(partial(self._gather, requests, options, single=single))
        return answers[0] if single else answers

    async def async_generate(
        self,
        prompt: Texts | None = None,
        sampling_params: Sampling | None = None,
        *,
        input_ids: Ids | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """`generate` for an event loop of your own: await it, and with `stream` go through it with `async for`."""
        requests, single = to_requests(prompt, input_ids, sampling_params, options, self._model, self._lora)
        if stream:
            return self._aiterate(self._stream(requests, options))
        work = partial(self._gather, requests, options, single=single)
        answers = await asyncio.wrap_future(self._client.run(work))
        return answers[0] if single else answers

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a chat, for `generate(input_ids=...)`: messages and tools are those of /v1/chat/completions.

        What users typed never becomes a special token. Raises ValueError and ApiError.
        """
        prompt = to_chat(messages, tools, self._model, add_generation_prompt=add_generation_prompt)
        return self._client.wait(partial(self._model.tokenized, prompt, must_fit=False))

    def encode(self, prompt: Texts, *, truncate: int | None = None) -> Any:
        """The vector of a text (`embedding`, and `prompt_tokens` in its `meta_info`), or the list of them for a list.

        For models that embed. What is too long is refused, or cut after `truncate` tokens; -1 is what the model reads.
        Raises ValueError and ApiError.
        """
        request, single = to_inputs(prompt, self._model, truncate)
        batch = self._client.wait(partial(self._client.vectors, request))
        vectors = [
            {"embedding": list(numbers(state.vector)), "meta_info": {"prompt_tokens": state.prompt_tokens}}
            for state in batch.states
        ]
        return vectors[0] if single else vectors

    def update_weights_from_disk(self, path: str | os.PathLike[str]) -> None:
        """Go on with the weights of a directory. Answers that have begun end with those they began with.

        Raises ApiError for weights that cannot take the place of the model's.
        """
        self._client.wait(partial(self._client.update_weights, str(Path(path).absolute())))

    def shutdown(self) -> None:
        """Stop the parts and give up what still runs: who waits for it gets EngineError. Harmless when called again."""
        self._forgotten.detach()
        self._parts.close()

    async def _gather(
        self, requests: Sequence[GenerateRequest], options: Mapping[str, Any], *, single: bool
    ) -> list[Any]:
        """Every answer; when one request fails the others are aborted."""
        tasks = [asyncio.ensure_future(self._whole(request, options)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            failed = next((place for place, task in enumerate(tasks) if _failed_with(task, error)), None)
            if failed is not None and not single:
                note_prompt(error, failed)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _whole(self, request: GenerateRequest, options: Mapping[str, Any]) -> Any:
        generation, choices = await self._client.whole(request)
        return orjson.loads(result_of(GenerateWriter(options.get("logprob_start_len")).whole(generation, choices)))

    def _stream(self, requests: Sequence[GenerateRequest], options: Mapping[str, Any]) -> OutputStream[Answer]:
        if len(requests) != 1:
            raise ValueError("one prompt can be streamed at a time")
        return OutputStream(self._growing(requests[0], options))

    async def _growing(self, request: GenerateRequest, options: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        form = GenerateWriter(options.get("logprob_start_len"))
        async with contextlib.aclosing(self._client.choices(request)) as arrivals:
            async for generation, choice in arrivals:
                yield orjson.loads(result_of(form.whole(generation, [choice])))

    def _iterate(self, answers: OutputStream[Answer]) -> Iterator[Answer]:
        try:
            while (answer := self._client.wait(answers.next)) is not None:
                yield answer
        finally:
            self._leave(answers)

    async def _aiterate(self, answers: OutputStream[Answer]) -> AsyncGenerator[Answer, None]:
        try:
            while (answer := await asyncio.wrap_future(self._client.run(answers.next))) is not None:
                yield answer
        finally:
            self._leave(answers)

    def _leave(self, answers: OutputStream[Answer]) -> None:
        """End a stream without waiting for it: an iterator that is forgotten may be so in any thread."""
        with contextlib.suppress(EngineError):
            self._client.run(answers.close)


def _failed_with(task: asyncio.Task[Any], error: BaseException) -> bool:
    return task.done() and not task.cancelled() and task.exception() is error
