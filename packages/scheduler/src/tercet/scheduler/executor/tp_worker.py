"""`TpModelWorker`: the executor of one rank. It loads a model, sizes the KV cache, and runs plans in order."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.cpu import CpuAttention
from tercet.kernels.attention.select import attention_backend, graph_backend
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.abi import FORMATS
from tercet.kernels.native.library import load_library
from tercet.kernels.native.linear import Quantization
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops import sampler_ops
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.triton import missing_triton
from tercet.scheduler.core.plan import CacheGroup, Capacity, Plan, StepResult
from tercet.scheduler.executor.cpu_threads import limit_torch
from tercet.scheduler.executor.cuda_graphs import CudaGraphRunner, CudaRecorder
from tercet.scheduler.executor.device_memory import available_bytes
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape, Scales
from tercet.scheduler.executor.kv_scales import read_kv_scales
from tercet.scheduler.executor.model_config import DecoderShape, ModelConfig, computed_dtype
from tercet.scheduler.executor.model_runner import Model, ModelRunner
from tercet.scheduler.executor.pacing import telling
from tercet.scheduler.executor.rehearsal import measured_kv_bytes, rehearse
from tercet.scheduler.executor.sampler import Sampler, SamplingOps
from tercet.scheduler.executor.shortage import release_cached
from tercet.scheduler.executor.shrinking import ShrinkingModel
from tercet.scheduler.executor.slot_grammars import SlotGrammars
from tercet.scheduler.executor.slot_tables import SlotTables
from tercet.scheduler.executor.step_output import StepOutput
from tercet.scheduler.executor.weights import Progress, dummy_weights, load_weights
from tercet.scheduler.grammar.backends import grammar_backend
from tercet.scheduler.grammar.desk import GrammarDesk
from tercet.scheduler.model_files import read_json
from tercet.scheduler.models import hugging_face
from tercet.scheduler.models.layer_ops import layer_ops, use_ops
from tercet.scheduler.models.native import NativeCausalLM, missing_native
from tercet.scheduler.models.native_linear import use_native_linears
from tercet.scheduler.models.registry import build_model, is_ours, named_architecture
from tercet.scheduler.ports import Advance

logger = logging.getLogger(__name__)

_CPU_SHARE, _GPU_SHARE = 0.5, 0.9
_KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": E4M3}


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What an operator can choose about model execution."""

    model: Path
    """A model directory."""
    dtype: str = "auto"
    """auto (see `served_dtype`), float32, float16 or bfloat16."""
    device: str = "auto"
    """auto (cuda where there is one), or a device as torch names it."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy fills a model with cheap random weights, quantised on a GPU where config.json says so."""
    slots: int = 64
    """Most choices that run at once."""
    context_length: int | None = None
    """Longest request, no longer than the model's own limit, which is the default."""
    page_size: int = 16
    """Tokens of a KV page."""
    kv_cache_bytes: int | None = None
    """Memory of the KV cache; by default a share of what is available."""
    kv_cache_dtype: str = "auto"
    """auto (the model's), bfloat16, or fp8_e4m3 in half the memory."""
    kv_cache_share: float | None = None
    """The share of memory available after loading that the KV cache takes; half on a CPU, most of it on a GPU."""
    step_tokens: int = 512
    """Most tokens of one step."""
    attention_backend: str = "auto"
    """auto, or a backend of tercet.kernels; cpu runs the whole model on native kernels."""
    quantization: Quantization = "none"
    """int8 and int4 round weights as they are loaded, and activations to 8 bits; on native kernels only."""
    threads: int | None = None
    """Cores that a model on a CPU uses; by default all that this process may run on."""
    overlap: bool = False
    """On a CPU, run steps in a thread of their own. An accelerator overlaps by itself."""
    grammar_backend: str = "llguidance"
    """What reads grammars; none refuses them."""
    fast_forward: bool = True
    """Tokens that a grammar leaves no choice about take no step of their own."""

    def __post_init__(self) -> None:
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in _KV_DTYPES:
            raise ValueError(f"kv_cache_dtype must be auto, {' or '.join(_KV_DTYPES)}, not {self.kv_cache_dtype!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be at least 1")
        if self.slots < 1 or self.page_size < 1 or self.step_tokens < 1:
            raise ValueError("slots, page_size and step_tokens must be at least 1")
        if self.kv_cache_share is not None and not 0 < self.kv_cache_share <= 1:
            raise ValueError("kv_cache_share must be above 0 and at most 1")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError("context_length must be at least 1")


class PendingStep:
    """A step that runs, or ran, in the executor's thread or at submission."""

    def __init__(self, output: Callable[[], StepOutput]) -> None:
        self._output = output

    def result(self) -> StepResult:
        """Wait for the step. Raises what the forward raised."""
        return self._output().result()


class TpModelWorker:
    """The `Executor` port, over one `ModelRunner`."""

    def __init__(
        self, options: WorkerOptions, progress: Progress | None = None, advance: Advance = lambda: None
    ) -> None:
        device = torch.device(_device(options.device))
        config = _shape_of(options, device)
        try:
            backend = attention_backend(options.attention_backend, device)
        except UnavailableBackendError as error:
            raise ValueError(str(error)) from error
        context_length = _context_length(options, config)
        shape = KVShape(
            page_size=options.page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=_KV_DTYPES.get(options.kv_cache_dtype, config.dtype),
        )
        scales = _kv_scales(options, config, shape)
        self._grammars = _grammars(options, config)
        native = backend is CpuAttention
        model = _load(options, config, shape, device, native=native, progress=progress)
        ops = _sampling_ops(model, device, native=native)
        given = options.kv_cache_bytes
        if given is None:
            given = _kv_bytes(options, config, context_length, shape, device, model, backend, ops)
        pages = _pages(given, options, shape, config.layers, context_length)
        group = KVGroup(name="full", layers=range(config.layers), pages=pages)
        self._pool = KVPool([group], shape, device, spare=device.type == "cuda", scales=scales)
        gibibytes = self._pool.bytes / 2**30
        logger.info("KV cache: %d tokens, %.2f GiB", pages * options.page_size, gibibytes)
        graphs = None
        if device.type == "cuda":
            graphs = _graphs(model, self._pool, backend)
            model = ShrinkingModel(model)
        elif device.type == "cpu":
            model = telling(model, advance)
        self._runner = ModelRunner(
            model,
            self._pool,
            backend,
            slots=options.slots,
            context_length=context_length,
            vocab_size=config.vocab_size,
            device=device,
            sampling_ops=ops,
            grammars=self._grammars,
            graphs=graphs,
        )
        self._graphs = self._runner.graphs
        self._capacity = _capacity(options, config, context_length, self._pool, self._grammars)
        threaded = options.overlap and device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="executor") if threaded else None

    @property
    def capacity(self) -> Capacity:
        """Fixed once the worker is built."""
        return self._capacity

    @property
    def grammars(self) -> GrammarDesk | None:
        """Where grammars are read before they are planned."""
        return None if self._grammars is None else self._grammars.desk

    def submit(self, plan: Plan) -> PendingStep:
        """Start a step. Steps run in the order they are submitted."""
        if self._thread is not None:
            return PendingStep(self._thread.submit(self._runner.execute, plan).result)
        step = PendingStep(_run(self._runner, plan))
        if self._graphs is not None:
            self._graphs.capture_next()
        return step

    def prepare(self) -> bool:
        """Record the next graph. See `Executor.prepare`."""
        return self._graphs is not None and self._graphs.capture_next()

    def close(self) -> None:
        """Let steps that were submitted finish, and start no more."""
        if self._thread is not None:
            self._thread.shutdown()
        if self._grammars is not None:
            self._grammars.close()


def _run(runner: ModelRunner, plan: Plan) -> Callable[[], StepOutput]:
    """Run a plan now. An error shows where the result is asked for."""
    try:
        output = runner.execute(plan)
    except Exception as error:
        future: Future[StepOutput] = Future()
        future.set_exception(error)
        return future.result
    return lambda: output


def _shape_of(options: WorkerOptions, device: torch.device) -> DecoderShape:
    """A `ModelConfig`, of an architecture that is written here."""
    dtype = computed_dtype(options.model, options.dtype, device)
    ours = is_ours(named_architecture(read_json(options.model / "config.json")))
    return (ModelConfig.load if ours else hugging_face.read_shape)(options.model, dtype)


def _load(
    options: WorkerOptions,
    config: DecoderShape,
    shape: KVShape,
    device: torch.device,
    *,
    native: bool,
    progress: Progress | None,
) -> Model:
    """The model with its weights, on native kernels where they know it."""
    if device.type == "cpu":
        limit_torch(options.threads)
    if not isinstance(config, ModelConfig):
        return _hosted(options, config, device, native=native)
    why_torch = missing_native(config, shape.dtype) if native else "they come with attention backend 'cpu'"
    if options.quantization != "none" and why_torch:
        raise ValueError(f"quantization {options.quantization} needs native kernels: {why_torch}")
    model = build_model(config, device)
    if options.load_format == "dummy":
        dummy_weights(model, quantization=config.quantization if device.type == "cuda" else None)
    else:
        load_weights(model, options.model, progress, dequantised=device.type != "cuda", lend=not why_torch)
    if device.type == "cuda":
        release_cached()  # what loading needed for a while is free again, for the KV cache
    if options.threads is not None and native:
        load_library().set_threads(options.threads)
    if why_torch:
        if native:
            logger.warning("%s: the layers of %s run on torch", why_torch, config.architecture)
        use_ops(model, layer_ops(device))
        return model
    packed = NativeCausalLM(model, load_library(), quantization=options.quantization)
    torch.set_num_threads(1)  # what is left to torch is small, and its threads would spin on the cores of ours
    return packed


def _hosted(options: WorkerOptions, shape: DecoderShape, device: torch.device, *, native: bool) -> Model:
    """A model that runs on transformers' modules, with linear layers on native kernels where these know the dtype."""
    why_torch = "" if native else "they come with attention backend 'cpu'"
    if native and shape.dtype not in FORMATS:
        why_torch = f"native kernels do not read weights in {str(shape.dtype).removeprefix('torch.')}"
    if options.quantization != "none" and why_torch:
        raise ValueError(f"quantization {options.quantization} needs native kernels: {why_torch}")
    model = hugging_face.load(options.model, shape, device, dummy=options.load_format == "dummy")
    if not why_torch:
        library = load_library()
        if options.threads is not None:
            library.set_threads(options.threads)
        use_native_linears(model, library, options.quantization)
    return model


def _sampling_ops(model: Model, device: torch.device, *, native: bool) -> SamplingOps:
    """The fastest for where the logits are, and what they are: native kernels read float32."""
    if native and isinstance(model, NativeCausalLM | hugging_face.HuggingFaceCausalLM):
        return NativeOps(load_library())
    if device.type == "cuda" and not missing_triton(device):
        from tercet.kernels.triton import sampler_ops as fused_ops

        return fused_ops
    return sampler_ops


def _graphs(
    model: Model, pool: KVPool, backend: Callable[[], AttentionBackend]
) -> Callable[[SlotTables, Sampler], CudaGraphRunner] | None:
    """Makes what replays decodes; None where the attention backend cannot be recorded."""
    backends = [made for _ in pool.groups if (made := graph_backend(backend))]
    if not backends:
        return None
    return partial(CudaGraphRunner, model, pool, backends, CudaRecorder())


def _capacity(
    options: WorkerOptions, config: DecoderShape, context_length: int, pool: KVPool, grammars: SlotGrammars | None
) -> Capacity:
    """What the core must know of a worker."""
    return Capacity(
        page_size=options.page_size,
        groups=[CacheGroup(group.name, group.pages, group.window) for group in pool.groups],
        slots=options.slots,
        context_length=context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=list(config.eos_token_ids),
        grammars=grammars.name if grammars else "",
    )


def _grammars(options: WorkerOptions, config: DecoderShape) -> SlotGrammars | None:
    backend = grammar_backend(options.grammar_backend, options.model, config.vocab_size, config.eos_token_ids)
    if backend is None:
        return None
    return SlotGrammars(backend, options.slots, config.vocab_size, fast_forward=options.fast_forward)


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _context_length(options: WorkerOptions, config: DecoderShape) -> int:
    wanted = options.context_length or config.context_length
    if wanted > config.context_length:
        raise ValueError(f"context_length {wanted} is beyond the model's {config.context_length}")
    return wanted


def _kv_scales(options: WorkerOptions, config: DecoderShape, shape: KVShape) -> Mapping[int, Scales] | None:
    """Those that a checkpoint has, where the cache has 8 bits."""
    if shape.dtype != E4M3 or options.load_format == "dummy":
        return None
    scales = read_kv_scales(options.model, config.layers)
    if not scales:
        logger.warning("the checkpoint has no scales for keys and values in 8 bits: they are 1")
    return scales


def _kv_bytes(
    options: WorkerOptions,
    config: DecoderShape,
    context_length: int,
    shape: KVShape,
    device: torch.device,
    model: Model,
    backend: Callable[[], AttentionBackend],
    ops: SamplingOps,
) -> int:
    """Memory for the KV cache: a share of what is free, on a GPU after the worst step it will ever have to run."""
    if device.type != "cuda":
        return int(available_bytes(device) * (options.kv_cache_share or _CPU_SHARE))
    run = partial(
        rehearse,
        model,
        backend,
        ops,
        shape,
        layers=range(config.layers),
        slots=options.slots,
        tokens=options.step_tokens,
        context_length=context_length,
        vocab_size=config.vocab_size,
        device=device,
    )
    free = partial(available_bytes, device)
    return measured_kv_bytes(free, run, options.kv_cache_share or _GPU_SHARE, options.step_tokens)


def _pages(given: int, options: WorkerOptions, shape: KVShape, layers: int, context_length: int) -> int:
    """As many pages as the memory gives, but no more than all slots could fill. Raises ValueError for none at all."""
    pages = given // (shape.page_bytes * layers)
    if pages < 1:
        raise ValueError(f"{given} bytes of KV cache do not hold one page of {shape.page_bytes * layers} bytes")
    return min(pages, options.slots * -(-context_length // options.page_size))
