"""`Engine`: a model in a Python program, without HTTP. Offline use is another client of the same messages."""

import asyncio
import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from tercet.frontend.display import choose_display
from tercet.frontend.engine_client import EngineClient, EngineError
from tercet.frontend.generate_request import GenerateRequest
from tercet.frontend.launch import Part, Patience, local_parts
from tercet.frontend.native import to_generate
from tercet.frontend.native_form import NativeForm
from tercet.frontend.native_schema import NativeGenerate
from tercet.frontend.run_directory import run_directory
from tercet.frontend.serve_config import LogLevel, SchedulerOptions, ServeConfig, ServeOptions
from tercet.frontend.supervisor import Supervisor

__all__ = ["Answer", "Engine", "EngineError"]

Answer = dict[str, Any]
"""What /generate answers: index, text, output_ids, meta_info."""
Texts = str | Sequence[str]
Ids = Sequence[int] | Sequence[Sequence[int]]
Sampling = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def offline_parts(config: ServeConfig, directory: Path) -> list[Part]:
    """Everything but a frontend."""
    return local_parts(config, directory, frontends=False)


class Engine:
    """A scheduler and a detokenizer as child processes, and their client. Usable from any thread, best in a `with`.

    `options` are the fields of `SchedulerOptions`. Dead parts are restarted, and their requests go on. Raises
    ConfigError, TypeError for an unknown option, and EngineError.
    """

    def __init__(
        self,
        model: str = "embedded",
        *,
        log_level: LogLevel = "warning",
        startup_timeout: float = 600.0,
        make_parts: Callable[[ServeConfig, Path], Sequence[Part]] = offline_parts,
        **options: Any,
    ) -> None:
        serve = ServeOptions(log_level=log_level, startup_timeout=startup_timeout)
        config = ServeConfig(model=model, serve=serve, scheduler=SchedulerOptions(**options))
        started = threading.Event()
        self._closing = contextlib.ExitStack()
        directory = self._closing.enter_context(run_directory())
        self.supervisor = Supervisor(
            make_parts(config, directory),
            directory,
            choose_display(log_level),
            log_level=log_level,
            patience=Patience(startup=startup_timeout),
            on_ready=lambda _: started.set(),
        )

        def supervise() -> None:
            try:
                self.supervisor.run()
            finally:
                started.set()

        thread = threading.Thread(target=supervise, name="engine-supervisor", daemon=True)
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(self.supervisor.stop)
        atexit.register(self.shutdown)
        try:
            self._client = EngineClient(directory)
            self._closing.callback(self._client.close)
            started.wait()
            if self.supervisor.failure is not None:
                raise EngineError(self.supervisor.failure.reason)
            self._model = self._client.wait(self._client.served())
        except BaseException:
            self.shutdown()
            raise

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
        Parameters are those of /generate. Raises ValueError for what cannot be meant, ApiError for what fails.
        """
        requests, single = self._requests(prompt, input_ids, sampling_params, options)
        if stream:
            return self._iterate(self._stream(requests, options))
        answers = self._client.wait(self._gather(requests, options))
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
        requests, single = self._requests(prompt, input_ids, sampling_params, options)
        if stream:
            return self._aiterate(self._stream(requests, options))
        answers = await asyncio.wrap_future(self._client.run(self._gather(requests, options)))
        return answers[0] if single else answers

    def shutdown(self) -> None:
        """Stop the parts and give up what still runs. Harmless when called again."""
        atexit.unregister(self.shutdown)
        self._closing.close()

    def _requests(
        self, prompt: Texts | None, input_ids: Ids | None, sampling: Sampling | None, options: Mapping[str, Any]
    ) -> tuple[list[GenerateRequest], bool]:
        """One request for each prompt, and whether there was but one, not in a list."""
        if (prompt is None) == (input_ids is None):
            raise ValueError("give either a prompt or input_ids")
        inputs: list[dict[str, Any]]
        if input_ids is None:
            single = isinstance(prompt, str)
            inputs = [{"text": text} for text in ([prompt] if single else prompt or ())]
        else:
            single = bool(input_ids) and isinstance(input_ids[0], int)
            inputs = [{"input_ids": ids} for ids in ([input_ids] if single else input_ids)]
        each = [sampling] * len(inputs) if sampling is None or isinstance(sampling, Mapping) else list(sampling)
        if len(each) != len(inputs):
            raise ValueError(f"{len(inputs)} prompts with {len(each)} sampling_params")
        bodies = [
            NativeGenerate.model_validate({**given, **options, "sampling_params": dict(params or {})})
            for given, params in zip(inputs, each, strict=True)
        ]
        return [request for body in bodies for request in to_generate(body, self._model)], single

    async def _gather(self, requests: Sequence[GenerateRequest], options: Mapping[str, Any]) -> list[Any]:
        """Every answer; when one request fails the others are aborted."""
        tasks = [asyncio.ensure_future(self._whole(request, options)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _whole(self, request: GenerateRequest, options: Mapping[str, Any]) -> Any:
        generation, choices = await self._client.whole(request)
        return orjson.loads(NativeForm(options.get("logprob_start_len")).whole(generation, choices))

    async def _stream(
        self, requests: Sequence[GenerateRequest], options: Mapping[str, Any]
    ) -> AsyncGenerator[Answer, None]:
        if len(requests) != 1:
            raise ValueError("one prompt can be streamed at a time")
        form = NativeForm(options.get("logprob_start_len"))
        async with contextlib.aclosing(self._client.choices(requests[0])) as arrivals:
            async for generation, choice in arrivals:
                yield orjson.loads(form.whole(generation, [choice]))

    def _iterate(self, answers: AsyncGenerator[Answer, None]) -> Iterator[Answer]:
        try:
            while (answer := self._client.wait(_next(answers))) is not None:
                yield answer
        finally:
            self._client.wait(_close(answers))

    async def _aiterate(self, answers: AsyncGenerator[Answer, None]) -> AsyncGenerator[Answer, None]:
        try:
            while (answer := await asyncio.wrap_future(self._client.run(_next(answers)))) is not None:
                yield answer
        finally:
            await asyncio.wrap_future(self._client.run(_close(answers)))


async def _next(answers: AsyncGenerator[Answer, None]) -> Answer | None:
    return await anext(answers, None)


async def _close(answers: AsyncGenerator[Answer, None]) -> None:
    await answers.aclose()
