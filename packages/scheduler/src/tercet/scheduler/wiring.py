"""Builds a scheduler process from its options: the one place where adapters are chosen."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from tercet.protocol.errors import ChannelError
from tercet.protocol.json_files import error_line
from tercet.protocol.messages.full_inbox import FullSchedulerInbox
from tercet.protocol.messages.messages import (
    Heartbeat,
    Message,
    Progress,
    Ready,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import ModelLimits, Role, Task
from tercet.protocol.node import Answer, ThreadNode, unanswered
from tercet.protocol.system.clock import SuspendAwareClock
from tercet.protocol.system.private_files import open_private
from tercet.protocol.system.process import gc_disabled_during_imports
from tercet.scheduler.__about__ import __version__
from tercet.scheduler.config import ConfigError, ExpertOptions, ModelOptions, ProcessOptions, ScheduleOptions
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.data_parallel.scheduler import core_of, cores_of
from tercet.scheduler.core.embedding.inputs import TextInputs
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan, EncodeMediaResult, MediaInputs
from tercet.scheduler.core.embedding.plan import EncodePlan, EncodeResult
from tercet.scheduler.core.embedding.scheduler import EmbeddingScheduler
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.diagnostics.crash_dump import EventRing
from tercet.scheduler.diagnostics.event_log import LogFile, Record, RecordingScheduler
from tercet.scheduler.diagnostics.profiler import ProfiledRunner
from tercet.scheduler.encoder_factory import ENCODERS, build_tower
from tercet.scheduler.executor.ranks.host_network import HostNetwork
from tercet.scheduler.executor_factory import EXECUTORS, ReportBytes, update_groups_of
from tercet.scheduler.kv_events.config import KVEventsConfig, read_kv_events_config
from tercet.scheduler.kv_events.publisher import KVEventPublisher
from tercet.scheduler.loaders import Loaders
from tercet.scheduler.loop import PlanT, ResultT, SchedulerLoop
from tercet.scheduler.model_files import ModelError, file_hashes, tokenizer_files
from tercet.scheduler.ports import Core, Executor, Runner
from tercet.scheduler.resolved_model import ResolvedModel, identity_of, on_gpu, resolve_served_model
from tercet.scheduler.status import StatusBoard
from tercet.scheduler.weight_transfer.staged_weights import StagedWeights
from tercet.scheduler.weight_transfer.weight_transfers import WeightTransfers

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
SOFTWARE = f"tercet-scheduler {__version__}"
PROGRESS_INTERVAL = 0.1

_Loaded = TypeVar("_Loaded")
AnyLoop = (
    SchedulerLoop[Plan, StepResult]
    | SchedulerLoop[EncodePlan, EncodeResult]
    | SchedulerLoop[EncodeMediaPlan, EncodeMediaResult]
)


class SchedulerProcess:
    """A scheduler process.

    Its node starts first, so that it sends heartbeats while the model is downloaded and loaded.
    """

    def __init__(
        self,
        process: ProcessOptions,
        model: ModelOptions,
        schedule: ScheduleOptions,
        network: HostNetwork | None = None,
        experts: ExpertOptions = ExpertOptions(),
    ) -> None:
        """Create the process; `network` is that of a model on several hosts."""
        experts.check(model.tensor_parallel_size, model.pipeline_parallel_size)
        self._experts = experts
        self._process = process
        self._model = model
        self._network = network
        self._schedule = schedule
        self._kv_events = _kv_events_config(process.kv_events_config)
        self._found: ResolvedModel | None = None
        self._stage = StagedWeights(lambda: process.state, process.peer)
        self._ring = None
        if process.crash_dump != "none":
            self._ring = EventRing(lambda: process.state, process.peer, redacted=process.crash_dump == "redacted")
        self._early_file_requests: dict[str, TokenizerFilesReq] = {}
        """Requests for the model's files, by peer, that arrived before the model was resolved."""
        self._board = StatusBoard(SuspendAwareClock())
        answers: dict[type[Message], Answer] = {TokenizerFilesReq: self._answer_files, Heartbeat: unanswered}
        self._node = ThreadNode(process.node_config(Role.SCHEDULER), FullSchedulerInbox, self._board.heartbeat, answers)
        self._stopped = False
        self._exit_thread: threading.Thread | None = None
        self._loop: AnyLoop | None = None

    def run(self) -> None:
        """Resolve the model, load it, send Ready, and serve until `stop`.

        Raises ConfigError or ModelError for a model or options that can never be served.
        """
        with ExitStack() as stack:
            stack.callback(self._join_exit_thread)
            log = self._open_log(stack)
            self._node.start()
            stack.callback(lambda: self._node.close("stopped" if self._stopped else "failed"))
            stack.callback(self._remove_stage)
            found = self._resolve_model()
            if self._model.encoder_only:
                self._loop, ready = self._build_media_loop(found, stack)
            elif found.task is Task.GENERATE:
                self._loop, ready = self._build_generation_loop(found, stack, log)
            else:
                self._loop, ready = self._build_encoder_loop(found, stack)
            gc.freeze()  # objects of loading stay alive: a collection that scanned them would delay every request
            self._node.set_ready(ready)
            try:
                self._loop.run()
            except Exception as error:
                self.dump(f"{type(error).__name__}: {error_line(error)}")
                raise

    def stop(self) -> None:
        """Finish held requests for at most `drain_grace` seconds, then end. A second call ends after the current step.

        Call it from a thread other than the one of `run`. A download or load in progress is not waited for.
        """
        again, self._stopped = self._stopped, True
        if self._loop is None:
            if self._exit_thread is None:
                self._exit_thread = threading.Thread(target=self._exit_while_loading, daemon=True)
                self._exit_thread.start()
            return
        if again:
            self._stop_now()
            return
        self._loop.draining = True
        timer = threading.Timer(self._process.drain_grace, self._stop_now)
        timer.daemon = True
        timer.start()
        self._node.wake()

    def dump(self, reason: str = "signal") -> None:
        """Write the last events of the core to a file, if they are kept. Thread-safe."""
        if self._ring is not None:
            self._ring.write(reason)

    def _exit_while_loading(self) -> None:
        """End the process while its main thread loads. An exception raised there would be lost inside some import."""
        self._node.close("stopped")
        self._remove_stage()
        os._exit(0)

    def _join_exit_thread(self) -> None:
        """Wait until `_exit_while_loading` ends the process: an error of loading must not change its exit status."""
        if self._exit_thread is not None:
            self._exit_thread.join()

    def _stop_now(self) -> None:
        if self._loop is not None:
            self._loop.stopping = True
        self._node.wake()

    def _resolve_model(self) -> ResolvedModel:
        """Resolve the model, and answer the requests for its files that arrived before."""
        if self._model.device.startswith("cuda"):  # the device may be missing, and downloading a model takes long
            with gc_disabled_during_imports():
                on_gpu(self._model)
        if (backend := self._model.attention_backend) != "auto":
            with gc_disabled_during_imports():
                from tercet.kernels.attention.select import backend_names

            if backend not in (names := backend_names()):
                raise ConfigError(f"--attention-backend {backend}: must be auto, {', '.join(names)}")
        found = resolve_served_model(self._model, self._process.weights)
        if found.task is not Task.GENERATE or self._model.encoder_only:
            if self._process.event_log:
                raise ConfigError("--event-log: encoders have no event log, leave the option out")
            if self._kv_events is not None:
                raise ConfigError(f"--kv-events-config: {found.name} has no prefix cache")
        if found.task is not Task.GENERATE and (self._model.encoder_only or self._model.language_only):
            flag = "--encoder-only" if self._model.encoder_only else "--language-only"
            raise ConfigError(f"{flag}: {found.name} generates no text, and has no tower beside a language model")
        self._found = found
        for source, request in list(self._early_file_requests.items()):
            if answer := _files_of(found, request):
                self._node.send(source, *answer)
        return found

    def _build_generation_loop(
        self, found: ResolvedModel, stack: ExitStack, log: BinaryIO | None
    ) -> tuple[AnyLoop, Ready]:
        """Return the loop of a generating model, and its announcement for frontends."""
        build = EXECUTORS[self._model.executor]
        executor = _with_config_errors(
            lambda: build(
                *(self._model, self._schedule, found, self._report_loading(), self._board.advance),
                *(self._network, self._experts),
            )
        )
        stack.callback(executor.close)
        transfers = WeightTransfers(
            self._stage, found.weights or found.path, update_groups_of(self._model, self._process.peer)
        )
        stack.callback(transfers.close)
        core = core_of(self._core_config(), executor.capacity)
        memories = [each.memory for each in cores_of(core)]
        publishers = self._publish_kv_events(memories, stack)
        tokens, each = memories[0].tokens, f" on each of {len(memories)} ranks" if len(memories) > 1 else ""
        self._send_progress(Progress(text=f"KV cache: {tokens} tokens in pages of {executor.capacity.page_size}{each}"))
        limits = _limits(found, executor, tokens)
        records: list[Record] = [LogFile(log).record] if log is not None else []
        if self._ring is not None:
            records.append(self._ring.record)

        def on_weights_loaded(path: str) -> None:
            transfers.on_loaded(Path(path))
            self._node.set_ready(self._ready(replace(found, weights=Path(path)), limits))

        def flush() -> None:
            for publisher in publishers:
                publisher.flush()

        loop = self._build_loop(
            RecordingScheduler(core, *records) if records else core,
            executor,
            loaders=Loaders(
                grammars=executor.grammars,
                late_masks=executor.late_masks,
                adapters=executor.adapters,
                weights=executor.weights,
                transfers=transfers,
                images=executor.images,
                audio=executor.audio,
            ),
            prepare=executor.prepare,
            on_weights_loaded=on_weights_loaded,
            on_turn=flush,
        )
        return loop, self._ready(found, limits)

    def _publish_kv_events(self, memories: Sequence[KVMemory], stack: ExitStack) -> list[KVEventPublisher]:
        """Publish the changes of the prefix cache of each attention rank, if this is configured. Raises ConfigError."""
        publishers: list[KVEventPublisher] = []
        for rank, memory in enumerate(memories, self._process.data_parallel_rank):
            if self._kv_events is None:
                break
            try:
                publishers.append(publisher := KVEventPublisher(self._kv_events, memory.page_size, rank))
            except ChannelError as error:
                raise ConfigError(f"--kv-events-config: {error}") from error
            stack.callback(publisher.close)
            memory.observe(publisher.record)
        return publishers

    def _ready(self, found: ResolvedModel, limits: ModelLimits) -> Ready:
        """Return the announcement of the model and the weights that are served from now on."""
        return Ready(limits=limits, identity=identity_of(self._model, found), software=SOFTWARE)

    def _build_media_loop(self, found: ResolvedModel, stack: ExitStack) -> tuple[AnyLoop, Ready]:
        """Return the loop of the tower of a model, and its announcement: it has no limits, so it gets no text."""
        self._check_encoder("--encoder-only has the tower alone")
        encoder = _with_config_errors(lambda: build_tower(self._model, found, self._board.advance))
        stack.callback(encoder.close)
        config = self._core_config()
        if config.policy is not PolicyName.PRIORITY:
            config = msgspec.structs.replace(config, policy=PolicyName.FAIR)
        core = EmbeddingScheduler(config, MediaInputs(encoder.form))
        return self._build_loop(core, encoder), Ready(encoder=encoder.form, software=SOFTWARE)

    def _check_encoder(self, why: str) -> None:
        """Raise ConfigError for options of models that generate."""
        if self._schedule.max_loras:
            raise ConfigError(f"--max-loras {self._schedule.max_loras}: {why}")
        if self._network is not None:
            raise ConfigError(f"--nnodes {self._network.hosts}: {why}, and runs on one host")

    def _build_encoder_loop(self, found: ResolvedModel, stack: ExitStack) -> tuple[AnyLoop, Ready]:
        """Return the loop of a model that gives vectors or scores, and its announcement.

        Raises ConfigError for adapters.
        """
        self._check_encoder(f"{found.name} generates no text")
        build = ENCODERS[self._model.executor]
        report = self._report_loading()
        served = _with_config_errors(lambda: build(self._model, found.task, found.path, report, self._board.advance))
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
        return self._build_loop(
            EmbeddingScheduler(self._core_config(), TextInputs(capacity)), served.encoder
        ), self._ready(found, limits)

    def _build_loop(
        self, core: Core[PlanT, ResultT], executor: Runner[PlanT, ResultT], **more: Any
    ) -> SchedulerLoop[PlanT, ResultT]:
        overlap = self._schedule.steps_ahead(gpu=on_gpu(self._model), stages=self._model.pipeline_parallel_size)
        node, board, process = self._node, self._board, self._process
        refusal = "" if self._model.executor == "torch" else "the fake executor computes nothing"
        profiled = ProfiledRunner(executor, lambda: process.state, process.peer, refusal)
        more["profile"] = profiled.answer
        return SchedulerLoop(core, profiled, node.drain, node.send, board, time.monotonic, overlap=overlap, **more)

    def _core_config(self) -> CoreConfig:
        schedule, ranks = self._schedule, self._experts.attention_ranks(self._model.tensor_parallel_size)
        return CoreConfig(
            policy=schedule.schedule_policy,
            token_budget=schedule.step_tokens(gpu=on_gpu(self._model), ranks=ranks),
            max_queued=schedule.max_queued_requests,
            radix_cache=not schedule.disable_radix_cache,
            protection=schedule.protection(gpu=on_gpu(self._model)),
            draft_rows=schedule.draft_rows(stages=self._model.pipeline_parallel_size),
            draft_by_cost=schedule.draft_by_cost(gpu=on_gpu(self._model)),
            stages=self._model.pipeline_parallel_size,
            attention_ranks=ranks,
        )

    def _remove_stage(self) -> None:
        """Remove weights that arrived in messages, if the process ends on purpose.

        A supervisor may start a successor with these weights: it removes them when the server stops.
        """
        if not self._stopped:
            return
        if self._process.supervisor:
            self._stage.remove_unfinished()
        else:
            self._stage.remove()

    def _open_log(self, stack: ExitStack) -> BinaryIO | None:
        if not self._process.event_log:
            return None
        try:
            descriptor = open_private(Path(self._process.event_log), os.O_WRONLY | os.O_TRUNC)
            file = os.fdopen(descriptor, "wb", buffering=0)  # unbuffered, so that closing cannot fail
            return stack.enter_context(file)
        except OSError as error:
            raise ConfigError(f"--event-log {self._process.event_log}: {error.strerror}") from error

    def _report_loading(self) -> ReportBytes:
        """Return a callback that reports loaded bytes to the supervisor at most every PROGRESS_INTERVAL seconds.

        Each call also resets the age of the current step, for a step that loads weights.
        """
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            self._board.advance()
            now = time.monotonic()
            if now - last >= PROGRESS_INTERVAL or done == total:
                last = now
                self._send_progress(Progress(text="weights", done=done, total=total))

        return report

    def _send_progress(self, progress: Progress) -> None:
        if self._process.supervisor:
            self._node.send(SUPERVISOR, progress)

    def _answer_files(self, source: str, message: Message) -> tuple[Message, *tuple[bytes, ...]] | None:
        """Answer a request for the tokenizer's files.

        Runs in the node's thread, so that tokenizers load while weights do.
        """
        if not isinstance(message, TokenizerFilesReq):
            return None
        self._early_file_requests[source] = message
        if self._found is None:
            return None  # `_resolve_model` answers: it reads `_early_file_requests` after it has set `_found`
        del self._early_file_requests[source]
        return _files_of(self._found, message)


def _files_of(found: ResolvedModel, request: TokenizerFilesReq) -> tuple[Message, *tuple[bytes, ...]] | None:
    try:
        files = tokenizer_files(found.path)
    except ModelError as error:  # they were readable when the model was resolved
        logger.error("tokenizer files: cannot be read, request not answered: error=%s", error)
        return None
    sha256 = list(file_hashes(files).values())
    return TokenizerFiles(id=request.id, model=found.name, names=list(files), sha256=sha256), *files.values()


def _kv_events_config(text: str) -> KVEventsConfig | None:
    """Return the configuration, None if events are off. Raises ConfigError."""
    try:
        config = read_kv_events_config(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--kv-events-config: {error}") from error
    return config if config.enabled else None


def _limits(found: ResolvedModel, executor: Executor, tokens: int) -> ModelLimits:
    capacity = executor.capacity
    embeddings = None if executor.images is None else executor.images.embeddings
    return ModelLimits(
        model=found.name,
        context_length=capacity.context_length,
        vocab_size=capacity.vocab_size,
        max_total_tokens=tokens,
        eos_token_ids=capacity.eos_token_ids,
        grammars=capacity.grammars,
        max_loras=capacity.adapters,
        images=capacity.images if embeddings is None else None,
        sounds=capacity.sounds if embeddings is None else None,
        video=capacity.video if embeddings is None else None,
        embeddings=embeddings,
        audio=None if capacity.audio is None else capacity.audio.form,
        encoder=None if capacity.texts is None else capacity.texts.form,
    )


def _with_config_errors(load: Callable[[], _Loaded]) -> _Loaded:
    """Call `load`. Raises ConfigError for an option that does not fit the model, and InsufficientMemoryError."""
    try:
        return load()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
