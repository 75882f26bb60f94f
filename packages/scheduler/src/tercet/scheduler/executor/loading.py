"""Model loading: our models or transformers', on native, fused or plain torch kernels."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops import sampler_ops
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.triton import missing_triton
from tercet.scheduler.architectures import is_ours, text_architecture
from tercet.scheduler.device.cpu_threads import limit_torch_threads
from tercet.scheduler.device.oom import lacks_memory, release_cached
from tercet.scheduler.executor.chunked_model import report_layers
from tercet.scheduler.executor.media.audio import LoadedAudio
from tercet.scheduler.executor.media.embeddings import LoadedEmbeddings, embedding_form
from tercet.scheduler.executor.media.images import LoadedImages
from tercet.scheduler.executor.media.prompt_media import LoadedMedia
from tercet.scheduler.executor.media.shared_embeddings import Embeddings, SharedEmbeddings, StageEmbeddings
from tercet.scheduler.executor.media.sounds import LoadedSounds
from tercet.scheduler.executor.media.texts import LoadedTexts
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.sampling.sampler import SamplingOps
from tercet.scheduler.executor.smoke_test import run_smoke_test
from tercet.scheduler.executor.worker_limits import served_context_length
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import (
    ModelError,
    model_identity,
    read_header,
    read_json,
    reading,
    weight_files,
)
from tercet.scheduler.models import hugging_face
from tercet.scheduler.models.audio.audio_model import load_encoder as load_audio_encoder
from tercet.scheduler.models.audio.sound_model import SoundModel
from tercet.scheduler.models.config.model_config import DecoderShape, ModelConfig, computed_dtype
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.encoder_decoder.cross_attention import CrossAttention
from tercet.scheduler.models.layers.layer_ops import OpsModule, layer_ops, set_ops
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.lora import LoRABank
from tercet.scheduler.models.layers.shard import WHOLE, Shard, Stage
from tercet.scheduler.models.native import NativeCausalLM, unsupported_natively
from tercet.scheduler.models.native_linear import (
    NativeProjection,
    unsupported_dtype,
    use_native_linears,
    use_native_projections,
)
from tercet.scheduler.models.registry import build_model, family_of, load_config
from tercet.scheduler.models.sliced_work import slice_work
from tercet.scheduler.models.tower import TowerModel, TowerT, load_tower
from tercet.scheduler.models.vision.image_model import ImageModel, bounded_for_cpu
from tercet.scheduler.models.vision.qwen_video import bounded_clips
from tercet.scheduler.models.weights.kv_scales import Scales, read_kv_scales
from tercet.scheduler.models.weights.tensor_files import open_tensors
from tercet.scheduler.models.weights.weights import Progress, check_weights, dummy_weights, load_weights
from tercet.scheduler.ports import Advance

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """A loaded model with its adapter memory."""

    model: Model
    adapters: LoRABank | None = None
    """Memory of the adapters; None if the model cannot run any."""
    images: LoadedMedia | None = None
    """Images or sounds in prompts; None if the model takes none."""
    rotary: Rotary | None = None
    """The rotation of most layers; None for a model without, or on transformers' own modules."""
    encoder: LoadedAudio | LoadedTexts | None = None
    """The encoder of audio or text; None for a model without."""


@contextmanager
def reading_model(directory: Path) -> Iterator[None]:
    """Read a model's files in the block. Raise ModelError for errors in files, as `reading` does.

    Out-of-memory and CUDA errors pass unchanged.
    """
    error: Exception | None = None
    with reading(str(directory)):
        try:
            yield
        except RuntimeError as raised:
            if not lacks_memory(raised) and "CUDA" not in str(raised):
                raise
            error = raised
    if error is not None:
        raise error


def shape_of(options: WorkerOptions, device: torch.device) -> DecoderShape:
    """Read the model's shape; a `ModelConfig` if the architecture is implemented here."""
    with reading_model(options.model):
        dtype = computed_dtype(options.model, options.dtype, device)
        shape = _read_shape(options.model, dtype)
    return replace(shape, spare_positions=options.step_tokens) if isinstance(shape, ModelConfig) else shape


def _read_shape(directory: Path, dtype: str) -> DecoderShape:
    ours = is_ours(text_architecture(read_json(directory / "config.json")))
    return (load_config if ours else hugging_face.read_shape)(directory, dtype)


def check_replacement(weights: Path, options: WorkerOptions, config: DecoderShape, shard: Shard = WHOLE) -> None:
    """Raise ModelError for a directory whose weights cannot replace those of the model.

    Without a tower none can: encoders keep theirs.

    It needs no config.json. If it has one, it must equal the model's in meaning, except for the stored dtype.
    """
    if options.language_only:
        raise ModelError("a language-only scheduler keeps the weights that it was started with")
    if not weights.is_dir():
        raise ModelError(f"{str(weights)!r} is no directory")
    if (weights / "config.json").is_file():
        dtype = str(config.dtype).removeprefix("torch.")
        own, other = (_read_shape(path, dtype) for path in (options.model, weights))
        differing = [each.name for each in fields(own) if getattr(own, each.name) != getattr(other, each.name, None)]
        if wrong := [name for name in differing if name != "eos_token_ids"]:
            raise ModelError(f"{weights}/config.json is of another model: {', '.join(wrong)}")
    # raises if the weights' identity, which is reported after loading, cannot be computed
    model_identity(options.model, "", weights=weights)
    if isinstance(config, ModelConfig):
        check_weights(build_model(config, "cpu", shard), weights)  # memory that is never written is not allocated
    for path in weight_files(weights):
        read_header(path)
        with open_tensors(path):
            pass  # raises if safetensors finds the file invalid


def weights_number(options: WorkerOptions) -> int:
    """Return a positive number of the weights here: others have another number. It is 1 if none were replaced."""
    if options.weights is None:
        return 1
    return int(model_identity(options.model, "", weights=options.weights).weights[:15], 16) + 2


def load_model(
    options: WorkerOptions,
    config: DecoderShape,
    cached: torch.dtype,
    device: torch.device,
    *,
    native: bool,
    progress: Progress | None,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load the model, or this rank's shard, with its weights, on native kernels if they support it and a KV cache of
    dtype `cached`.
    """
    if device.type == "cpu":
        limit_torch_threads(options.threads)
    if device.type == "cuda" and (missing := missing_triton(device)):
        logger.warning("%s; the model runs on plain torch, which is slower", missing)
    no_linears = unsupported_dtype(config.dtype, "weights") if native else _why_not_native(device)
    if options.quantization != "none" and no_linears:
        raise ValueError(f"quantization {options.quantization} needs native kernels: {no_linears}")
    if options.threads is not None and native:
        load_library().set_threads(options.threads)
    if not isinstance(config, ModelConfig):
        return LoadedModel(_load_hugging_face(options, config, device, native=not no_linears))
    why_torch = no_linears or unsupported_natively(config, cached, shard)
    model = build_model(config, device, shard)
    in_full = _in_full(config, device)
    if options.load_format == "dummy":
        dummy_weights(model, quantization=None if in_full else config.quantization)
    else:
        load_weights(model, options.checkpoint, progress, dequantized=in_full, keep_mapped=not why_torch)
    bank = _bank(options, config, model, device, shard)
    if device.type == "cuda":
        release_cached()  # return temporary memory of loading to the device, for the KV cache
    if why_torch:
        if native:
            logger.warning("%s: %s runs on torch except for supported layers", why_torch, config.architecture)
        set_ops(model, layer_ops(device))
        if not no_linears and use_native_projections(model, load_library(), options.quantization):
            torch.set_num_threads(1)
        if bank is not None:
            bank.attach(model)
        return LoadedModel(model, bank, rotary=model.model.rotary)
    packed = NativeCausalLM(model, load_library(), quantization=options.quantization, adapters=bank)
    # torch has little left to compute, and its threads would spin on the native kernels' cores
    torch.set_num_threads(1)
    return LoadedModel(packed, bank, rotary=model.model.rotary)


def load_images(
    options: WorkerOptions, config: DecoderShape, device: torch.device, *, native: bool, shard: Shard, advance: Advance
) -> LoadedMedia | None:
    """Load the tower of images or sounds, which only rank 0 has.

    Return None if the model takes neither, or has no weights or stages that cannot take images. Raise ValueError then
    for `language_only`.
    """
    family = family_of(config.architecture) if isinstance(config, ModelConfig) else None
    sounds = images = None
    if family is not None and options.load_format != "dummy":
        sounds = family.sounds(options.model)
        images = family.images(options.model) if sounds is None else None
    if sounds is None and images is None:
        if options.language_only:
            raise ValueError("language_only: the model takes no images or sounds in prompts")
        return None
    assert isinstance(config, ModelConfig)
    if (needed := _needed(sounds, images, config, shard)) is not None:
        if options.language_only:
            raise ValueError(f"language_only: {needed}")
        if shard.stage.is_last and not shard.rank and not shard.attention.rank:
            logger.warning("requests with %s are refused: %s", "images" if sounds is None else "audio", needed)
        return None
    if images is not None and device.type == "cpu":
        images = bounded_for_cpu(images)
    if images is not None:
        images = bounded_clips(images, served_context_length(options, config), cpu=device.type == "cpu")
    shared = _shared_embeddings(0 if images is None else images.deepstack, config, shard, device)
    here = not shard.rank and shard.stage.is_last
    if options.language_only:
        model = sounds or images
        assert model is not None
        form = embedding_form(model, config, options.model, options.weights)
        return LoadedEmbeddings(model, form, (lambda array, *_: array.to(device)) if here else None, shared)

    def tower(model: TowerModel[TowerT]) -> TowerT | None:
        if not here:
            return None
        loaded = load_tower(model, options.checkpoint, config.dtype, device)
        if device.type == "cpu":
            _prepare_for_cpu(loaded, config.dtype, native=native, advance=advance)
        return loaded

    if sounds is not None:
        return LoadedSounds(sounds, tower(sounds), shared)
    assert images is not None
    return LoadedImages(images, tower(images), shared)


def _needed(sounds: SoundModel | None, images: ImageModel | None, config: ModelConfig, shard: Shard) -> str | None:
    """Return why a model takes no sounds or images in such a shard; None if it takes them."""
    if sounds is not None and shard.attention.size > 1:
        return "they need no --enable-dp-attention"
    if images is not None and images.deepstack > len(Stage(0, shard.stage.count).layers(config.layers)):
        return f"the first {images.deepstack} layers get embeddings, stage 0 has fewer"
    return None


def _shared_embeddings(deepstack: int, config: ModelConfig, shard: Shard, device: torch.device) -> Embeddings | None:
    """Return what gives embeddings to the ranks that need them; None for a single rank."""
    if shard.stage.links is not None:
        width = config.hidden_size * (1 + deepstack)
        return StageEmbeddings(shard.stage.links, width, config.dtype, device, first=shard.stage.is_first)
    return None if shard.size == 1 else SharedEmbeddings(shard.collectives, config.dtype, device)


def load_encoder(
    options: WorkerOptions, model: Model, device: torch.device, *, native: bool, advance: Advance
) -> LoadedAudio | LoadedTexts | None:
    """Load the encoder of audio; that of text is part of the model. Return None if the model has neither.

    Raise ValueError for an encoder of audio with random weights.
    """
    if not isinstance(model, CausalLM):
        return None
    config = model.config
    if config.encoder is not None:
        return LoadedTexts.of(family_of(config.architecture).start(options.model), model)
    audio = family_of(config.architecture).audio(options.model)
    if audio is None:
        return None
    if options.load_format == "dummy":
        raise ValueError(f"load_format dummy: {config.architecture} needs the weights of its encoder")
    encoder = load_audio_encoder(audio, options.checkpoint, config.dtype, device)
    if device.type == "cpu":
        _prepare_for_cpu(encoder, config.dtype, native=native, advance=advance)
    return LoadedAudio.of(audio, encoder, model)


def _prepare_for_cpu(encoder: nn.Module, dtype: torch.dtype, *, native: bool, advance: Advance) -> None:
    """Let an encoder report its layers, use native kernels and compute in slices of time."""
    report_layers(encoder, advance)
    if native and not unsupported_dtype(dtype, "weights"):
        use_native_linears(encoder, load_library())
    slice_work(encoder)


def _bank(
    options: WorkerOptions, config: ModelConfig, model: CausalLM, device: torch.device, shard: Shard
) -> LoRABank | None:
    """Allocate memory for adapters, in float32 on a CPU."""
    if not options.max_loras:
        return None
    if config.latent is not None and config.recurrent is None:
        raise ValueError(f"max_loras {options.max_loras}: models with latent attention run no adapters")
    if any(isinstance(each, CrossAttention) for each in model.modules()):
        raise ValueError(f"max_loras {options.max_loras}: models with cross-attention run no adapters")
    dtype = torch.float32 if device.type == "cpu" else config.dtype
    all_stages = None if shard.stage.count == 1 else build_model(config, "meta", replace(shard, stage=Stage()))
    bank = LoRABank(model, options.max_loras, options.max_lora_rank, dtype, device, all_stages=all_stages)
    logger.info(
        "LoRA: adapter slots=%d max_rank=%d memory=%.2f GiB",
        options.max_loras,
        options.max_lora_rank,
        bank.bytes / 2**30,
    )
    return bank


def _in_full(config: ModelConfig, device: torch.device) -> bool:
    """Return whether quantized layers are dequantized at loading for lack of kernels. MXFP4 experts are unpacked one
    at a time.
    """
    return device.type != "cuda" and (config.quantization is None or config.quantization.method != "mxfp4")


def _why_not_native(device: torch.device) -> str:
    """Return the reason why a worker's attention, and so its whole model, does not use native kernels."""
    return (device.type == "cpu" and missing_library()) or "they come with attention backend 'cpu'"


def _load_hugging_face(options: WorkerOptions, shape: DecoderShape, device: torch.device, *, native: bool) -> Model:
    """Load a model that runs on transformers' modules, with linear layers on `native` kernels and no adapters."""
    if options.max_loras:
        raise ValueError(f"max_loras {options.max_loras}: models on transformers' own modules run no adapters")
    model = hugging_face.load(options.checkpoint, shape, device, run_smoke_test, dummy=options.load_format == "dummy")
    if native:
        use_native_linears(model, load_library(), options.quantization)
    return model


def sampling_ops(model: Model, device: torch.device, *, native: bool) -> SamplingOps:
    """Return the fastest sampling kernels for the device and dtype of the logits; native kernels read float32."""
    projects = isinstance(model, OpsModule) and isinstance(model.ops, NativeProjection)
    if native and (projects or isinstance(model, NativeCausalLM | hugging_face.HuggingFaceCausalLM)):
        return NativeOps(load_library())
    if device.type == "cuda" and not missing_triton(device):
        from tercet.kernels.triton.sampling import sampler_ops as fused_ops

        return fused_ops
    return sampler_ops


def kv_scales(options: WorkerOptions, config: DecoderShape, cached: torch.dtype) -> Mapping[int, Scales] | None:
    """Read the checkpoint's scales for an 8-bit KV cache; None for other caches."""
    if cached != E4M3 or options.load_format == "dummy":
        return None
    scales = read_kv_scales(options.checkpoint, config.layers)
    if not scales:
        logger.warning("KV cache: the checkpoint has no scales for keys and values in 8 bits, using 1")
    return scales
