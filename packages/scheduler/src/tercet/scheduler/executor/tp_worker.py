"""The executor of one tensor-parallel rank: loads a model, sizes the KV cache and runs plans in order."""

import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tercet.kernels.attention.cpu import CpuAttention
from tercet.kernels.attention.select import attention_backend
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.memory import give_back
from tercet.protocol.json_files import error_line
from tercet.protocol.messages.values import MemoryTag
from tercet.scheduler.core.data_parallel.plans import merged_plan
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.device.devices import select_device
from tercet.scheduler.device.oom import release_cached, require_memory
from tercet.scheduler.device.pool_memory import allocate_tensors, release_tensors
from tercet.scheduler.executor.attention_backends import backend_of
from tercet.scheduler.executor.graphs.cuda_graphs import CudaRecorder, graph_runners
from tercet.scheduler.executor.graphs.warmup import compile_mask_kernels, ordinary_plans
from tercet.scheduler.executor.kv_budget import KVBudget, kv_shapes, state_pool_of
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.loading import (
    LoadedModel,
    check_replacement,
    kv_scales,
    load_encoder,
    load_images,
    load_model,
    reading_model,
    sampling_ops,
    shape_of,
    weights_number,
)
from tercet.scheduler.executor.lora.adapters import AdapterLoader, StepAdapters, adapter_loader_of
from tercet.scheduler.executor.media.audio import StepAudio
from tercet.scheduler.executor.media.encoder_memory import encoder_memory, step_encoder
from tercet.scheduler.executor.media.prompt_media import array_store, step_images
from tercet.scheduler.executor.media.step_media import step_media
from tercet.scheduler.executor.media.texts import StepTexts
from tercet.scheduler.executor.model_runner import Model, ModelRunner
from tercet.scheduler.executor.rank_strategy import rank_strategy_of
from tercet.scheduler.executor.sampling.slot_grammars import SlotGrammars, slot_grammars
from tercet.scheduler.executor.step_output import StepOutput
from tercet.scheduler.executor.step_share import step_share
from tercet.scheduler.executor.weights_loader import weights_loader
from tercet.scheduler.executor.worker_limits import capacity_of, end_ids, log_cache, served_context_length
from tercet.scheduler.executor.worker_options import KV_DTYPES, WorkerOptions
from tercet.scheduler.grammar.cache import GrammarLoader
from tercet.scheduler.models.config.model_config import ModelConfig, with_context_length
from tercet.scheduler.models.layers.shard import WHOLE, Shard
from tercet.scheduler.models.weights.weights import Progress
from tercet.scheduler.ports import Advance, AudioSamples

logger = logging.getLogger(__name__)


class PendingStep:
    """A step that has run or is running, in the executor's thread or at submission."""

    def __init__(self, output: Callable[[], StepOutput]) -> None:
        self._output = output

    def result(self) -> StepResult:
        """Wait for the step. Raise the error of its forward pass."""
        return self._output().result()


class TpModelWorker:
    """The `Executor` port, over one `ModelRunner`."""

    def __init__(
        self,
        options: WorkerOptions,
        progress: Progress | None = None,
        advance: Advance = lambda: None,
        shard: Shard = WHOLE,
    ) -> None:
        """Load the model. All ranks must be created with equal arguments except `shard`, and run the same plans."""
        device = select_device(options.device)
        config = shape_of(options, device)
        try:
            with require_memory("a first kernel"):
                backend = attention_backend(options.attention_backend, device)
        except UnavailableBackendError as error:
            raise ValueError(str(error)) from error
        context_length = served_context_length(options, config)
        config = replace(config, context_length=context_length)
        native = backend is CpuAttention
        shapes = kv_shapes(options, config, shard)
        cached = KV_DTYPES.get(options.kv_cache_dtype, config.dtype)
        backend = backend_of(options, device, config, shapes, backend)
        budget = KVBudget(options, config, shapes, device, shard)
        if (longest := budget.longest_context()) < context_length:
            logger.warning("context length lowered to fit memory: wanted=%d served=%d", context_length, longest)
            context_length, config = longest, with_context_length(config, longest)
            budget = replace(budget, config=config)
        scales = kv_scales(options, config, cached)
        self._options, self._config, self._cached, self._device = options, config, cached, device
        self._released: frozenset[MemoryTag] = frozenset()
        self._backend, self._native, self._shard = backend, native, shard
        self._strategy, self._advance, self._progress = rank_strategy_of(shard), advance, progress
        budget.check()
        ends = end_ids(options, config)
        self._grammars = slot_grammars(options, config, ends)
        with require_memory("the model's weights"), reading_model(options.checkpoint):
            self._loaded: LoadedModel | None = (loaded := self._load(options))
        ops = sampling_ops(loaded.model, device, native=self._native)
        self._encoded = encoder_memory(loaded.encoder, options, config, device)
        budget = replace(budget, images=loaded.images, encoder=self._step_encoder(loaded))
        sizes = budget.sizes(loaded.model, backend, ops)
        groups, tokens = budget.groups(sizes), sizes.pages * options.page_size
        with require_memory(f"a KV cache of {tokens} tokens, lower kv_cache_bytes"):
            spare = device.type == "cuda" and shard.attention.size == 1
            self._pool = KVPool(groups, device, spare=spare, scales=scales, page_size=options.page_size)
            self._states = state_pool_of(options, config, shard, sizes.snapshots, device)
        log_cache(self._pool, self._states, options)
        self.images = array_store(loaded.images)
        self._adapter_loader = None if loaded.adapters is None else adapter_loader_of(loaded.adapters)
        with require_memory("steps beside the KV cache, lower kv_cache_bytes or the slots"):
            self._runner = self._runner_of(loaded)
            if device.type == "cuda":
                self._warm_up(loaded.model)
        self.weights = weights_loader(self._check)
        self._capacity = capacity_of(
            options, config, ends, self._pool, self._states, self._grammars, loaded.images, self._encoded
        )
        threaded = options.overlap and device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="executor") if threaded else None

    @property
    def capacity(self) -> Capacity:
        """Limits of the worker, fixed once it is built."""
        return self._capacity

    @property
    def grammars(self) -> GrammarLoader | None:
        """The loader that compiles grammars before they are planned."""
        return None if self._grammars is None else self._grammars.loader

    @property
    def late_masks(self) -> SlotGrammars | None:
        """The source of choices whose late masks have become ready."""
        return self._grammars

    @property
    def audio(self) -> AudioSamples | None:
        """Samples of audio clips; None if the model takes none."""
        return None if self._encoded is None else self._encoded.store

    @property
    def adapters(self) -> AdapterLoader | None:
        """The loader that reads adapters before they are planned; None if the model runs none."""
        return self._adapter_loader

    def submit(self, plan: Plan) -> PendingStep:
        """Start a step. Steps run in the order they are submitted."""
        if self._thread is not None:
            return PendingStep(self._thread.submit(self._execute, plan).result)
        return PendingStep(_run(self._execute, plan))

    def follow(self, plan: Plan) -> None:
        """Run a step whose result rank 0 returns. Raise the error of its forward pass."""
        self._execute(plan)
        if self._adapter_loader is not None and plan.adapters:
            self._adapter_loader.retain(())  # rank 0 tracks which choices still use an adapter

    def force(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Append forced tokens that rank 0's grammars have determined. See `ModelRunner.force`."""
        self._runner.force(slot, first, tokens)

    @property
    def records(self) -> bool:
        """Return whether `prepare` may have something to do."""
        return not self._released and self._runner.graphs is not None

    def prepare(self) -> bool:
        """Capture the next graph. See `Executor.prepare`."""
        return not self._released and self._runner.graphs is not None and self._runner.graphs.capture_next()

    def _execute(self, plan: Plan) -> StepOutput:
        """Run a plan, then capture a graph unless the plan failed, because ranks must capture together."""
        if plan.weights:
            options = replace(self._options, weights=Path(plan.weights), load_format="safetensors")
            return StepOutput(plan, [], None, [], fault=self._change(options, self._released - {MemoryTag.WEIGHTS}))
        if plan.released is not None:
            return StepOutput(plan, [], None, [], fault=self._change(self._options, frozenset(plan.released)))
        output = self._runner.execute(plan)
        self.prepare()
        return output

    def _load(self, options: WorkerOptions) -> LoadedModel:
        native, shard, config, device = self._native, self._shard, self._config, self._device
        progress, advance = self._progress, self._advance
        loaded = load_model(options, config, self._cached, device, native=native, progress=progress, shard=shard)
        images = load_images(options, config, device, native=native, shard=shard, advance=advance)
        encoder = load_encoder(options, loaded.model, device, native=native, advance=advance)
        return loaded._replace(images=images, encoder=encoder)

    def _runner_of(self, loaded: LoadedModel) -> ModelRunner:
        """Return a runner of a model over the existing pages."""
        options, device, strategy, model = self._options, self._device, self._strategy, loaded.model
        graphs = None
        if device.type == "cuda" and self._states is None and self._encoded is None and self._shard.records:
            recorder = strategy.wrap_recorder(CudaRecorder(check_sync=not isinstance(self._config, ModelConfig)))
            rows, chained = options.slots, options.draft_rows
            graphs = graph_runners(model, self._pool, self._backend, recorder, decode_rows=rows, chained_rows=chained)
        images = step_images(loaded.images, loaded.rotary, self.images, device)
        bank = loaded.adapters
        adapters = None if bank is None else StepAdapters(bank, options.rows, device, self._adapter_loader)
        return ModelRunner(
            strategy.wrap_model(model, device, self._advance),
            self._pool,
            self._backend,
            slots=options.rows,
            context_length=self._config.context_length,
            vocab_size=self._config.vocab_size,
            device=device,
            sampling_ops=sampling_ops(model, device, native=self._native),
            grammars=self._grammars,
            adapters=adapters,
            graphs=graphs,
            agree=strategy.agree,
            oom_policy=strategy.oom_policy,
            logprobs_mode=options.logprobs_mode,
            states=self._states,
            media=step_media(images, self._step_encoder(loaded), device),
            share=step_share(self._shard.attention, options.own_slots, model, device),
        )

    def _step_encoder(self, loaded: LoadedModel) -> StepAudio | StepTexts | None:
        """Return the audio clips or texts of a model's steps; None if it has no encoder of them."""
        return step_encoder(loaded.encoder, self._encoded, self._backend, self._options.rows, self._device)

    def _warm_up(self, model: Model) -> None:
        """Run steps on an unused page, so that kernels are compiled before requests wait for them."""
        options, config, runner = self._options, self._config, self._runner
        # warm up without graphs; graphs of rare step shapes are captured on first use
        graphs, runner.graphs = runner.graphs, None
        chained, adapted = options.draft_rows > 0, options.max_loras > 0
        for plan in ordinary_plans(
            options.own_rows, options.step_tokens, config.context_length, chained=chained, adapted=adapted
        ):
            runner.execute(merged_plan([plan] * options.attention_ranks, options.own_slots)).result()
        runner.graphs = graphs
        if self._grammars is not None:
            ops = sampling_ops(model, self._device, native=self._native)
            compile_mask_kernels(ops, config.vocab_size, config.dtype, self._device)

    def _check(self, path: str) -> None:
        """Check weights in a thread. Raise for weights that cannot replace those of the model."""
        options = replace(self._options, weights=Path(path), load_format="safetensors")
        check_replacement(Path(path), options, self._config, self._shard)
        kv_scales(options, self._config, self._cached)

    def _change(self, options: WorkerOptions, released: frozenset[MemoryTag]) -> str:
        """Load the weights of `options`, and release the memory with these tags, or allocate what has other tags.

        If that fails in any rank, restore what was before and return the reason. Raise if that fails, too.
        """
        before, fault, number = (self._options, self._released), "", 0
        gc.unfreeze()  # in case the process froze its objects after start
        try:
            number = weights_number(options)
            self._set_memory(options, released)
        except Exception as error:  # any error in the files; or lack of memory, for which the previous weights may fit
            logger.error("weights or memory: change failed: path=%s", options.checkpoint, exc_info=True)
            fault = error_line(error)
        if not self._shard.all_equal(0 if fault else number):
            fault = fault or "another rank has other weights there, or cannot load them or allocate memory"
            logger.error("weights or memory: restoring the previous state")
            self._set_memory(*before)
        gc.freeze()
        return fault

    def _set_memory(self, options: WorkerOptions, released: frozenset[MemoryTag]) -> None:
        """Change to these weights and this released memory. The model goes first: memory does not hold two."""
        if runner := vars(self).pop("_runner", None):
            runner.close()
            del runner
        if MemoryTag.WEIGHTS in released or options is not self._options:
            self._loaded = None
        pools = [*self._pool.tensors, *(() if self._states is None else self._states.tensors)]
        pools += [] if self._encoded is None else self._encoded.tensors
        if MemoryTag.KV_CACHE in released:
            release_tensors(pools)
        release_cached()
        give_back()
        if MemoryTag.KV_CACHE not in released:
            allocate_tensors(pools)
        if MemoryTag.WEIGHTS not in released and self._loaded is None:
            self._pool.set_scales(kv_scales(options, self._config, self._cached))
            self._loaded = self._load(options)
        self._options, self._released = options, released
        if self._loaded is not None and not released:
            self._runner = self._runner_of(self._loaded)

    def close(self) -> None:
        """Let submitted steps finish, and start no more."""
        if self._thread is not None:
            self._thread.shutdown()
        if not self._released:
            self._runner.close()
        for each in (self._grammars, self._adapter_loader, self.weights):
            if each is not None:
                each.close()


def _run(execute: Callable[[Plan], StepOutput], plan: Plan) -> Callable[[], StepOutput]:
    """Run a plan now. Return a function that raises its error or returns its output."""
    future: Future[StepOutput] = Future()
    try:
        future.set_result(execute(plan))
    except Exception as error:
        future.set_exception(error)
    return future.result
