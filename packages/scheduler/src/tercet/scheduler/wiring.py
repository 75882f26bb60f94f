"""Builds a scheduler process from its options: the one place where adapters are chosen."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tercet.protocol.awake import AwakeClock
from tercet.protocol.lifecycle import settling_in
from tercet.protocol.messages import (
    Heartbeat,
    Message,
    Progress,
    Ready,
    SchedulerInbox,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.node import Answer, NodeConfig, ThreadNode, unanswered
from tercet.protocol.security import Security
from tercet.protocol.values import ModelIdentity, ModelLimits, Role, Task
from tercet.scheduler.__about__ import __version__
from tercet.scheduler.announcing import AnnouncingExecutor
from tercet.scheduler.config import ConfigError, ModelOptions, ProcessOptions, ScheduleOptions
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.embedding_plan import EncodePlan, EncodeResult
from tercet.scheduler.core.embedding_scheduler import EmbeddingScheduler
from tercet.scheduler.core.plan import CacheGroup, Capacity, Plan, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.encoders import ENCODERS
from tercet.scheduler.event_log import RecordingScheduler
from tercet.scheduler.loop import Core, PlanT, ResultT, SchedulerLoop
from tercet.scheduler.model_files import (
    ModelError,
    check_tokenizer,
    file_hashes,
    model_identity,
    read_json,
    resolve_model,
    served_dtype,
    tokenizer_files,
)
from tercet.scheduler.model_task import task_of
from tercet.scheduler.outbox import Outbox
from tercet.scheduler.ports import Advance, Executor, Runner
from tercet.scheduler.status import StatusBoard

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
PROGRESS_INTERVAL = 0.1

_Loaded = TypeVar("_Loaded")
ReportBytes = Callable[[int, int], None]
"""Told (bytes done, bytes in all) while weights load."""


def on_gpu(options: ModelOptions) -> bool:
    """Whether a model runs on a GPU, which wants more at once than a CPU."""
    if options.executor != "torch" or options.device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class Found:
    """The model that is served."""

    path: Path
    """Its directory."""
    name: str
    """What clients call it."""
    task: Task
    weights: Path | None = None
    """The directory of its weights, if it is another."""


def identity_of(options: ModelOptions, found: Found) -> ModelIdentity:
    """By which a model is known: where it is computed decides with the options in which dtype that is."""
    dtype = served_dtype(found.path, options.dtype, gpu=on_gpu(options), encoder=found.task is not Task.GENERATE)
    return model_identity(
        found.path, dtype, options.quantization, options.kv_cache_dtype, options.context_length, found.weights
    )


def build_torch(
    options: ModelOptions, schedule: ScheduleOptions, found: Found, report: ReportBytes, advance: Advance
) -> Executor:
    """The real thing."""
    with settling_in():
        from tercet.scheduler.executor.tp_worker import TpModelWorker
        from tercet.scheduler.executor.worker_options import WorkerOptions
        from tercet.scheduler.models.registry import is_ours, named_architecture

    size = options.tensor_parallel_size
    architecture = named_architecture(read_json(found.path / "config.json"))
    if size > 1 and not is_ours(architecture):
        raise ConfigError(f"--tensor-parallel-size {size}: {architecture} is transformers' own, and never shared")
    gpu = on_gpu(options)
    worker = WorkerOptions(
        model=found.path,
        weights=found.weights,
        dtype=options.dtype,
        device=options.device,
        load_format="dummy" if options.load_format == "dummy" else "safetensors",
        slots=schedule.slots(gpu=gpu),
        context_length=options.context_length,
        page_size=options.page_size,
        step_tokens=schedule.step_tokens(gpu=gpu),
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_bytes=options.kv_cache_bytes,
        attention_backend=options.attention_backend,
        quantization=options.quantization,
        threads=options.threads,
        overlap=schedule.steps_ahead(gpu=gpu) > 0,
        grammar_backend=options.grammar_backend,
        max_loras=schedule.max_loras,
        max_lora_rank=schedule.max_lora_rank,
    )
    if size == 1:
        return TpModelWorker(worker, report, advance)
    from tercet.scheduler.executor.ranks import Ranks

    return Ranks(worker, size, report, advance)


def build_fake(
    options: ModelOptions,
    schedule: ScheduleOptions,
    found: Found,
    report: ReportBytes,  # noqa: ARG001
    advance: Advance,  # noqa: ARG001
) -> Executor:
    """A model that costs nothing, with the vocabulary of a real one; needs no torch."""
    from tercet.scheduler.testing.fake_executor import FakeExecutor

    config = read_json(found.path / "config.json")
    length, vocab_size = (config.get(name) for name in ("max_position_embeddings", "vocab_size"))
    if not isinstance(length, int) or not isinstance(vocab_size, int):
        raise ModelError(f"{found.path}/config.json lacks max_position_embeddings or vocab_size")
    length = options.context_length or length
    slots = schedule.slots(gpu=False)
    pages = slots * -(-length // options.page_size)
    capacity = Capacity(
        page_size=options.page_size,
        groups=[CacheGroup("full", pages)],
        slots=slots,
        context_length=length,
        vocab_size=vocab_size,
        eos_token_ids=[],
        adapters=schedule.max_loras,
    )
    return FakeExecutor(capacity, verify=False, weights=str(found.weights or ""))


EXECUTORS: dict[str, Callable[[ModelOptions, ScheduleOptions, Found, ReportBytes, Advance], Executor]] = {
    "torch": build_torch,
    "fake": build_fake,
}


AnyLoop = SchedulerLoop[Plan, StepResult] | SchedulerLoop[EncodePlan, EncodeResult]


def find_model(options: ModelOptions, weights: str = "") -> Found:
    """The model that options name, downloaded if need be, which may take long. Raises ModelError."""
    path = resolve_model(options.model)
    name = path.name if Path(options.model).is_dir() else options.model
    found = Found(path, name, task_of(path, options.task), Path(weights).absolute() if weights else None)
    if found.weights is not None and found.task is not Task.GENERATE:
        raise ModelError(f"{name} generates no text, and has its own weights alone")
    check_tokenizer(path)
    return found


class SchedulerProcess:
    """Everything of one scheduler: its node first, so that it is heard while the model is fetched and loads."""

    def __init__(self, process: ProcessOptions, model: ModelOptions, schedule: ScheduleOptions) -> None:
        self._process = process
        self._model = model
        self._schedule = schedule
        self._found: Found | None = None
        self._asked_early: dict[str, TokenizerFilesReq] = {}
        """By peer: what was asked of the model before it was found."""
        self._board = StatusBoard(AwakeClock())
        config = NodeConfig(
            role=Role.SCHEDULER,
            peer=process.peer,
            listen=process.listen,
            advertise=process.advertise,
            supervisor=process.supervisor,
            security=Security.load(process.keys, Role.SCHEDULER) if process.keys else None,
            insecure_loopback=process.insecure_loopback,
        )
        answers: dict[type[Message], Answer] = {TokenizerFilesReq: self._answer_files, Heartbeat: unanswered}
        self._node = ThreadNode(config, SchedulerInbox, self._board.heartbeat, answers)
        self._stopped = False
        self._leaving: threading.Thread | None = None
        self._loop: AnyLoop | None = None

    def run(self) -> None:
        """Find the model, load it, say Ready, serve until `stop`.

        Raises ConfigError or ModelError for what can never be served.
        """
        with ExitStack() as stack:
            stack.callback(self._let_leave)
            log = self._open_log(stack)
            self._node.start()
            stack.callback(lambda: self._node.close("stopped" if self._stopped else "failed"))
            found = self._find()
            if found.task is Task.GENERATE:
                self._loop, limits = self._generating(found, stack, log)
            else:
                self._loop, limits = self._encoding(found, stack)
            gc.freeze()  # what loading made stays: no collection need look at it, which would hold up every request
            self._announce(found, limits)
            self._loop.run()

    def stop(self) -> None:
        """Finish what is held, for `drain_grace` seconds at most, and end; called again, end after the step it is in.

        For one thread that is not the one of `run`. A model that is still fetched, or loads, is not waited for.
        """
        again, self._stopped = self._stopped, True
        if self._loop is None:
            if self._leaving is None:
                self._leaving = threading.Thread(target=self._leave, daemon=True)
                self._leaving.start()
            return
        if again:
            self._stop_now()
            return
        self._loop.draining = True
        timer = threading.Timer(self._process.drain_grace, self._stop_now)
        timer.daemon = True
        timer.start()
        self._node.wake()

    def _leave(self) -> None:
        """End the process while its main thread loads: an exception raised there would be lost in some import."""
        self._node.close("stopped")
        os._exit(0)

    def _let_leave(self) -> None:
        """Whatever loading comes to once the process leaves, it is `_leave` that ends it."""
        if self._leaving is not None:
            self._leaving.join()

    def _stop_now(self) -> None:
        if self._loop is not None:
            self._loop.stopping = True
        self._node.wake()

    def _find(self) -> Found:
        """The model, of which those who have asked are told."""
        found = find_model(self._model, self._process.weights)
        if found.task is not Task.GENERATE and self._process.event_log:
            raise ConfigError("--event-log: what an encoder does is not recorded")
        self._found = found
        for source, request in list(self._asked_early.items()):
            self._node.send(source, *_files_of(found, request))
        return found

    def _generating(self, found: Found, stack: ExitStack, log: BinaryIO | None) -> tuple[AnyLoop, ModelLimits]:
        """The loop of a model that generates, and what frontends must know of it."""
        build = EXECUTORS[self._model.executor]
        executor = _checked(
            lambda: build(self._model, self._schedule, found, self._report_loading(), self._board.advance)
        )
        stack.callback(executor.close)
        core = Scheduler(self._core_config(), executor.capacity)
        tokens = core.memory.tokens
        self._tell(Progress(text=f"KV cache: {tokens} tokens in pages of {executor.capacity.page_size}"))
        limits = _limits(found, executor.capacity, tokens)
        loop = self._looped(
            core if log is None else RecordingScheduler(core, log),
            AnnouncingExecutor(executor, lambda path: self._announce(replace(found, weights=Path(path)), limits)),
            grammars=executor.grammars,
            adapters=executor.adapters,
            weights=executor.weights,
            prepare=executor.prepare,
        )
        return loop, limits

    def _announce(self, found: Found, limits: ModelLimits) -> None:
        """Tell peers what is served from now on."""
        software = f"tercet-scheduler {__version__}"
        self._node.set_ready(Ready(limits=limits, identity=identity_of(self._model, found), software=software))

    def _encoding(self, found: Found, stack: ExitStack) -> tuple[AnyLoop, ModelLimits]:
        """The same of a model that gives vectors or scores. Raises ConfigError for adapters."""
        if self._schedule.max_loras:
            raise ConfigError(f"--max-loras {self._schedule.max_loras}: {found.name} generates no text")
        build = ENCODERS[self._model.executor]
        report = self._report_loading()
        served = _checked(lambda: build(self._model, found.task, found.path, report, self._board.advance))
        stack.callback(served.encoder.close)
        capacity = served.encoder.capacity
        limits = ModelLimits(
            model=found.name,
            context_length=capacity.context_length,
            vocab_size=capacity.vocab_size,
            max_total_tokens=capacity.context_length,
            task=found.task,
            width=capacity.width,
            labels=served.labels,
        )
        return self._looped(EmbeddingScheduler(self._core_config(), capacity), served.encoder), limits

    def _looped(
        self, core: Core[PlanT, ResultT], executor: Runner[PlanT, ResultT], **more: Any
    ) -> SchedulerLoop[PlanT, ResultT]:
        outbox = Outbox(self._node.send, time.monotonic)
        overlap = self._schedule.steps_ahead(gpu=on_gpu(self._model))
        drain, board = self._node.drain, self._board
        return SchedulerLoop(core, executor, drain, outbox, board, time.monotonic, overlap=overlap, **more)

    def _core_config(self) -> CoreConfig:
        schedule = self._schedule
        return CoreConfig(
            policy=schedule.schedule_policy,
            token_budget=schedule.step_tokens(gpu=on_gpu(self._model)),
            max_queued=schedule.max_queued_requests,
            radix_cache=not schedule.disable_radix_cache,
        )

    def _open_log(self, stack: ExitStack) -> BinaryIO | None:
        if not self._process.event_log:
            return None
        try:
            return stack.enter_context(Path(self._process.event_log).open("wb"))
        except OSError as error:
            raise ConfigError(f"--event-log {self._process.event_log}: {error.strerror}") from error

    def _report_loading(self) -> ReportBytes:
        """Passes the bytes loaded on to the supervisor, not too often. Each is a sign of life, if a step loads them."""
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            self._board.advance()
            now = time.monotonic()
            if now - last >= PROGRESS_INTERVAL or done == total:
                last = now
                self._tell(Progress(text="weights", done=done, total=total))

        return report

    def _tell(self, progress: Progress) -> None:
        if self._process.supervisor:
            self._node.send(SUPERVISOR, progress)

    def _answer_files(self, source: str, message: Message) -> tuple[Message, *tuple[bytes, ...]] | None:
        """Runs in the node's thread, so that tokenizers load while weights do."""
        if not isinstance(message, TokenizerFilesReq):
            return None
        self._asked_early[source] = message
        if self._found is None:
            return None  # `_find` will answer, for it looks at what was asked after it has found
        del self._asked_early[source]
        return _files_of(self._found, message)


def _files_of(found: Found, request: TokenizerFilesReq) -> tuple[Message, *tuple[bytes, ...]]:
    files = tokenizer_files(found.path)
    sha256 = list(file_hashes(files).values())
    return TokenizerFiles(id=request.id, model=found.name, names=list(files), sha256=sha256), *files.values()


def _limits(found: Found, capacity: Capacity, tokens: int) -> ModelLimits:
    return ModelLimits(
        model=found.name,
        context_length=capacity.context_length,
        vocab_size=capacity.vocab_size,
        max_total_tokens=tokens,
        eos_token_ids=capacity.eos_token_ids,
        grammars=capacity.grammars,
        max_loras=capacity.adapters,
    )


def _checked(load: Callable[[], _Loaded]) -> _Loaded:
    """What is loaded. Raises ConfigError where an option and the model do not go together."""
    try:
        return load()
    except ValueError as error:
        raise ConfigError(str(error)) from error
