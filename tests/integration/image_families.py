"""Tiny random models that read images, whole from image files to answers, here and in transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor as Llama4Texts
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from packages.frontend.tests.media.image_files import noise, odd_images, saved
from packages.scheduler.tests.conftest import VOCAB_SIZE, write_tokenizer
from tercet.frontend.manager.inputs.images import PlacedImage, images_in, placed_images, sounds_in
from tercet.frontend.media.image_decoder import DecodedImage, digest_of
from tercet.frontend.media.image_pipe import Decode
from tercet.frontend.media.image_worker import decoded_image
from tercet.frontend.media.prompt_media import replacement_of
from tercet.frontend.model.prompts import TextPrompt
from tercet.protocol.messages.media import ImageFormat
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.testing import Driver, request
from tests.integration.llama4_processor import Llama4Processor

FIRST_MARK = VOCAB_SIZE - 5
"""Id of the first token that the tokenizer gets for images."""
ANSWER = 10
TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZES = {"one pixel": (1, 1), "portrait": (40, 90), "landscape": (100, 37), "odd": (61, 47), "square": (90, 90)}
"""Width and height of images."""
Parts = Sequence[str | list[int]]
"""Names of images, and runs of token ids."""


ODD = {name: file for name, file in odd_images().items() if name not in ("1x1", "16 bits")}
"""Files of odd sizes, kinds and formats."""


def file(name: str) -> bytes:
    return ODD[name] if name in ODD else saved(noise(*SIZES[name], seed=len(name)))


def image(name: str) -> Image.Image:
    """Return an image upright, as transformers loads it."""
    return ImageOps.exif_transpose(Image.open(BytesIO(file(name))))


@dataclass(frozen=True)
class Family:
    """Model with images, and the way to its inputs in transformers."""

    architecture: str
    config: Mapping[str, Any]
    """Fields of config.json beside `text_config`."""
    text_type: str
    marks: Sequence[str]
    """Tokens of images, in the order of their ids from `FIRST_MARK` on."""
    preprocessor: Mapping[str, Any]
    """Content of preprocessor_config.json."""
    inputs: Callable[[Any, list[Image.Image]], dict[str, torch.Tensor]]
    """Inputs of transformers' model, for a processor of `preprocessor` and images."""
    processor: type
    text: Callable[[DecodedImage], str]
    """Text of an image."""
    refused: Sequence[tuple[Mapping[str, Any], str]]
    """Changes of `preprocessor` that are refused, and why."""
    refused_configs: Sequence[tuple[Mapping[str, Any], str]]
    """The same of config.json."""
    text_config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `text_config` beside those of `TEXT`."""
    typed: str = ""
    """Name of the types of tokens, which transformers' model gets; empty if it gets none."""

    def write(self, directory: Path, *, old_names: bool = False) -> Path:
        """Write the same checkpoint every time. `old_names` are the names of tensors of transformers 4."""
        kind = getattr(transformers, self.architecture)
        text = {**TEXT, "model_type": self.text_type, **self.text_config}
        config = kind.config_class(text_config=text, **self.config)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = kind(config)
            for name, parameter in model.named_parameters():
                if "norm" in name and "vision" not in name:
                    torch.nn.init.normal_(parameter, 1.0, 0.3)
                elif "vision" in name or "projector" in name or "connector" in name:
                    torch.nn.init.normal_(parameter, 0.0, 0.3)
                elif name.endswith("embed_tokens.weight"):
                    torch.nn.init.normal_(parameter, 0.0, 0.05 if "gemma" in self.text_type else 0.5)  # it is scaled
            torch.nn.init.zeros_(model.get_output_embeddings().weight[FIRST_MARK:])  # no answer has tokens of images
            for name, buffer in model.named_buffers():
                if "std_" in name:
                    torch.nn.init.normal_(buffer, 1.0, 0.3)
                elif name.endswith(("put_min", "put_max")):
                    buffer.fill_(1.5 if name.endswith("max") else -1.5)
        model.save_pretrained(directory, save_original_format=old_names)
        (directory / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))
        write_tokenizer(directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.marks])
        assert tokenizer.token_to_id(self.marks[0]) == FIRST_MARK
        tokenizer.save(str(directory / "tokenizer.json"))
        return directory


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, and its images with their places and arrays."""

    ids: list[int]
    images: list[PlacedImage]


class Run:
    """Core over a real worker, which gets images as the frontend makes them."""

    def __init__(self, directory: Path, *, budget: int = 1024, **options: Any) -> None:
        made: dict[str, Any] = {"device": "cpu", "slots": 8, "page_size": 4, "kv_cache_bytes": 1 << 24}
        self.worker = TpModelWorker(WorkerOptions(model=directory, **(made | options)))
        self.driver = Driver(self.worker.capacity, CoreConfig(token_budget=budget), executor=self.worker)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    @property
    def form(self) -> ImageFormat:
        form = self.worker.capacity.images
        assert form is not None
        return form

    def decoded(self, name: str, count: int = 1) -> DecodedImage:
        """Return an image as the frontend makes it of one of so many images of a prompt."""
        order = Decode(
            file=file(name),
            size=self.form.among(count).size,
            patch=self.form.patch,
            resample=self.form.resample,
            seconds=5,
        )
        made = decoded_image(order)
        return DecodedImage(
            array=made.array,
            height=made.height,
            width=made.width,
            grid=made.grid,
            original=made.original,
            sha256=digest_of(made),
        )

    def prompt(self, parts: Parts) -> Prompt:
        ids, images = [1], []
        count = sum(isinstance(part, str) for part in parts)
        for part in parts:
            if isinstance(part, str):
                images.append(shown := self.decoded(part, count))
                text = replacement_of(shown, self.form)
                ids += self.tokenizer.encode(text, add_special_tokens=False).ids
            else:
                ids += part
        return Prompt(ids, placed_images(images, TextPrompt(text="", param="prompt"), ids, self.form))

    def send(self, rid: str, parts: Parts, **more: Any) -> TokenizedGenerateReqInput:
        prompt = self.prompt(parts)
        given = {"max_new_tokens": ANSWER, "ignore_eos": True, "temperature": 0.0}
        places = [each.place for each in prompt.images]
        images, sounds = images_in(places), sounds_in(places)
        asked = request(rid, prompt.ids, images=images, sounds=sounds, **(given | more))
        if prompt.images:
            assert self.worker.images is not None
            assert self.worker.images.add([*images, *sounds], [each.array for each in prompt.images]) == ""
        self.driver.send(asked)
        return asked

    def answers(self, requests: Mapping[str, Parts], **more: Any) -> dict[str, list[int]]:
        """Return the answers to requests that run side by side."""
        for rid, parts in requests.items():
            self.send(rid, parts, **more)
        self.driver.run()
        return {rid: self.driver.output[rid, 0] for rid in requests}


class Reference:
    """transformers' `generate` and image processor."""

    def __init__(self, family: Any, directory: Path) -> None:
        self._family = family
        self._directory = directory
        self._known: dict[str, tuple[list[int], list[float]]] = {}

    @cached_property
    def _model(self) -> Any:
        kind = getattr(transformers, self._family.architecture)
        return kind.from_pretrained(self._directory, attn_implementation="eager")

    def answer(self, run: Run, parts: Parts, tokens: int = ANSWER) -> list[int]:
        return self.scored(run, parts, tokens)[0]

    @torch.inference_mode()
    def scored(self, run: Run, parts: Parts, tokens: int) -> tuple[list[int], list[float]]:
        """Return the tokens of an answer and their log-probabilities."""
        key = repr((tokens, parts))
        if key not in self._known:
            ids = torch.tensor([run.prompt(parts).ids])
            given = self._inputs(run, ids, [part for part in parts if isinstance(part, str)])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
                **given,
            )
            answer = out.sequences[0, ids.shape[1] :]
            chosen = torch.cat(out.logits).float().log_softmax(-1).gather(1, answer[:, None])
            self._known[key] = answer.tolist(), chosen.flatten().tolist()
        return self._known[key]

    def _inputs(self, run: Run, ids: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model beside the ids, for any images or sounds."""
        processor = self._family.processor(**self._family.preprocessor)
        made: dict[str, torch.Tensor] = self._family.inputs(processor, [image(name) for name in names]) if names else {}
        if self._family.typed:
            made[self._family.typed] = (ids == run.form.token_id).int()
        return made


def _of_pixtral(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    out = processor(images=images, return_tensors="pt")
    return {"pixel_values": out["pixel_values"], "image_sizes": out["image_sizes"]}


def _pixtral_text(patch: int) -> Callable[[DecodedImage], str]:
    def text(shown: DecodedImage) -> str:
        rows = [["[IMG]"] * (shown.width // patch) + ["[IMG_BREAK]"] for _ in range(shown.height // patch)]
        return "".join([*np.concatenate(rows)[:-1], "[IMG_END]"])

    return text


def _pixtral_family(architecture: str, merged: int, **config: Any) -> Family:
    return Family(
        architecture=architecture,
        config={
            "vision_config": {**VISION, "model_type": "pixtral", "patch_size": 7, "image_size": 84},
            "image_token_index": FIRST_MARK,
            **config,
        },
        text_type="mistral",
        marks=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        preprocessor={"size": {"longest_edge": 84}, "patch_size": {"height": 7 * merged, "width": 7 * merged}},
        inputs=_of_pixtral,
        processor=PixtralImageProcessorPil,
        text=_pixtral_text(7 * merged),
        refused=[
            ({"size": {"shortest_edge": 84}}, "only a longest_edge"),
            ({"do_center_crop": True}, "do_center_crop True is not supported"),
            ({"do_normalize": False}, "do_normalize False is not supported"),
        ],
        refused_configs=[
            ({"vision_feature_layer": 4}, "vision_feature_layer: 4 is not a layer"),
            ({"image_token_index": 200}, "tokenizer.json lacks the tokens of images"),
            ({"vision_config": {"model_type": "pixtral", "patch_size": [7, 8]}}, "patch_size: .* only a square's side"),
        ],
    )


def _pixel_values(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    return {"pixel_values": processor(images=images, return_tensors="pt")["pixel_values"]}


def _llava_text(strategy: str, more: int) -> Callable[[DecodedImage], str]:
    processor: Any = SimpleNamespace(
        patch_size=7, image_token="<image>", vision_feature_select_strategy=strategy, num_additional_image_tokens=more
    )

    def text(shown: DecodedImage) -> str:
        pixels = {"pixel_values": [np.zeros((3, shown.height, shown.width))]}
        return str(LlavaProcessor.replace_image_token(processor, pixels, 0))

    return text


def _llava_family(kind: str, processor: type, preprocessor: Mapping[str, Any], text_type: str, **config: Any) -> Family:
    strategy = config["vision_feature_select_strategy"]
    other = {"default": "full", "full": "default"}[strategy]
    return Family(
        architecture="LlavaForConditionalGeneration",
        config={
            "vision_config": {**VISION, "model_type": kind, "patch_size": 7, "image_size": 44},
            "image_token_index": FIRST_MARK,
            **config,
        },
        text_type=text_type,
        marks=("<image>",),
        preprocessor=preprocessor,
        inputs=_pixel_values,
        processor=processor,
        text=_llava_text(strategy, int(strategy == "default")),
        refused=[
            ({"size": {"longest_edge": 42}}, "size .* is not supported"),
            ({"size": {"height": 49, "width": 49}, "do_center_crop": False}, "49 x 49 pixels are not of image_size 44"),
            ({"do_pad": True}, "do_pad True is not supported"),
            ({"do_rescale": False}, "do_rescale False is not supported"),
        ],
        refused_configs=[
            ({"vision_feature_select_strategy": other}, f"'{other}' is not supported with {kind}"),
            ({"vision_feature_layer": [-1, -5]}, "vision_feature_layer: .* is not a layer of the 3"),
            ({"vision_config": {"model_type": "vit"}}, "vision_config.model_type: 'vit' is not one of"),
        ],
    )


_GRIDS = [[height * 44, width * 44] for height in (1, 2, 3) for width in (1, 2, 3)]


def _onevision_text(shown: DecodedImage) -> str:
    processor: Any = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)  # without a tokenizer
    processor.num_image_tokens, processor.vision_feature_select_strategy = 36, "full"
    processor.vision_aspect_ratio, processor.image_token = "anyres_max_3", "<image>"
    processor.image_processor = LlavaOnevisionImageProcessorPil(image_grid_pinpoints=_GRIDS)
    inputs = {
        "batch_num_images": [1 if shown.original else 2],
        "image_sizes": [list(shown.original)],
        "pixel_values": [[np.zeros((3, 44, 44))]],
    }
    return str(processor.replace_image_token(inputs, 0))


def _of_onevision(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the inputs of one prompt, as transformers' chat template has them."""
    return dict(processor([images], return_tensors="pt"))


def _onevision_family(**config: Any) -> Family:
    return Family(
        architecture="LlavaOnevisionForConditionalGeneration",
        config={
            "vision_config": {
                **VISION,
                "model_type": "siglip_vision_model",
                "patch_size": 7,
                "image_size": 44,
                "vision_use_head": False,
            },
            "image_token_index": FIRST_MARK,
            "image_grid_pinpoints": _GRIDS,
            "vision_aspect_ratio": "anyres_max_3",
            **config,
        },
        text_type="qwen2",
        marks=("<image>",),
        preprocessor={"size": {"height": 44, "width": 44}, "image_grid_pinpoints": _GRIDS, "image_mean": [0.5] * 3},
        inputs=_of_onevision,
        processor=LlavaOnevisionImageProcessorPil,
        text=_onevision_text,
        refused=[
            ({"size": {"height": 49, "width": 49}}, "is not the image_size 44"),
            ({"image_grid_pinpoints": _GRIDS[1:]}, "image_grid_pinpoints are not those of config.json"),
            ({"do_center_crop": True}, "do_center_crop True is not supported"),
        ],
        refused_configs=[
            ({"vision_feature_select_strategy": "default"}, "'default' is not supported, only 'full'"),
            ({"vision_aspect_ratio": "anyres"}, "'anyres' is not supported, only anyres_max_N"),
            ({"vision_feature_layer": [-1, -5]}, "vision_feature_layer: .* is not a layer of the 3"),
        ],
    )


def _internvl_text(shown: DecodedImage) -> str:
    processor: Any = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<context>", image_seq_length=4
    )
    return str(InternVLProcessor.replace_image_token(processor, {"num_patches": [shown.height // shown.width]}, 0))


def _of_internvl(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    return {"pixel_values": processor(images=images, crop_to_patches=True, return_tensors="pt")["pixel_values"]}


def _internvl_family(text_type: str, layer: int, **vision: Any) -> Family:
    return Family(
        architecture="InternVLForConditionalGeneration",
        config={
            "vision_config": {
                **VISION,
                "model_type": "internvl_vision",
                "patch_size": [7, 7],
                "image_size": [28, 28],
                **vision,
            },
            "image_token_id": FIRST_MARK,
            "image_seq_length": 4,
            "vision_feature_layer": layer,
            "tie_word_embeddings": False,
        },
        text_type=text_type,
        marks=("<context>", "<img>", "</img>"),
        preprocessor={"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 6},
        inputs=_of_internvl,
        processor=GotOcr2ImageProcessorPil,
        text=_internvl_text,
        refused=[
            ({"size": {"height": 28, "width": 35}}, "is not the image_size 28"),
            ({"do_rescale": False}, "do_rescale False is not supported"),
        ],
        refused_configs=[
            ({"image_seq_length": 16}, "a tile has 4 embeddings and not 16"),
            ({"vision_feature_select_strategy": "full"}, "'full' is not supported"),
            ({"vision_feature_layer": [-1, 1]}, "only one layer"),
        ],
    )


_ROWS = 4
"""Maximum rows and columns of tiles of a SmolVLM's image."""


def _smolvlm_text(shown: DecodedImage) -> str:
    return str(get_image_prompt_string(*shown.grid, 4, "<fake_token_around_image>", "<image>", "<global-img>"))


def _of_smolvlm(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    out = processor(images=[images], return_tensors="pt")
    return {name: out[name] for name in ("pixel_values", "pixel_attention_mask")}


def _smolvlm_family(name: str) -> Family:
    places = [f"<row_{row + 1}_col_{column + 1}>" for row in range(_ROWS) for column in range(_ROWS)]
    return Family(
        architecture=f"{name}ForConditionalGeneration",
        config={
            "vision_config": {**VISION, "model_type": f"{name.lower()}_vision", "patch_size": 7, "image_size": 30},
            "image_token_id": FIRST_MARK,
            "scale_factor": 2,
        },
        text_type="llama",
        marks=("<image>", "<fake_token_around_image>", "<global-img>", *(places if name == "SmolVLM" else ())),
        preprocessor={"size": {"longest_edge": 30 * _ROWS}, "max_image_size": {"longest_edge": 30}},
        inputs=_of_smolvlm,
        processor=SmolVLMImageProcessorPil,
        text=_smolvlm_text,
        refused=[
            ({"size": {"longest_edge": 5000}}, "size .* only a longest_edge of at most 4096"),
            ({"max_image_size": {"longest_edge": 28}}, "max_image_size 28 is not the image_size 30"),
            ({"do_image_splitting": False}, "do_image_splitting False is not supported"),
        ],
        refused_configs=[({"image_token_id": 200}, "tokenizer.json lacks the tokens of images")],
    )


def _of_llama4(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    return {"pixel_values": processor(images).float()}


def _llama4_text(shown: DecodedImage) -> str:
    texts: Any = SimpleNamespace()
    return str(Llama4Texts._prompt_split_image(texts, shown.grid, 4))


def _llama4_family() -> Family:
    vision = {
        **VISION,
        "patch_size": 7,
        "image_size": 28,
        "projector_input_dim": 24,
        "projector_output_dim": 24,
        "vision_output_dim": 24,
        "intermediate_size": 128,
    }
    return Family(
        architecture="Llama4ForConditionalGeneration",
        config={"vision_config": vision, "image_token_index": FIRST_MARK},
        text_type="llama4_text",
        marks=(
            *("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        preprocessor={"size": {"height": 28, "width": 28}, "max_patches": 6},
        inputs=_of_llama4,
        processor=Llama4Processor,
        text=_llama4_text,
        refused=[
            ({"size": {"height": 28, "width": 35}}, "is not the image_size 28"),
            ({"resize_to_max_canvas": True}, "resize_to_max_canvas True is not supported"),
            ({"max_patches": -1}, "max_patches -1 is not supported"),
        ],
        refused_configs=[
            ({"image_token_index": 200}, "tokenizer.json lacks the tokens of images"),
            ({"vision_config": {**vision, "pixel_shuffle_ratio": 0.3}}, "0.3 is not supported for 28 pixels"),
        ],
        text_config={
            "intermediate_size": 32,
            "intermediate_size_mlp": 72,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [1],
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 32,
            "floor_scale": 8,
            "attn_scale": 0.4,
            "pad_token_id": None,
        },
    )


def _of_gemma4(processor: Any, images: list[Image.Image]) -> dict[str, torch.Tensor]:
    out = processor(images=images, return_tensors="pt")
    return {name: out[name] for name in ("pixel_values", "image_position_ids")}


def _gemma4_text(shown: DecodedImage) -> str:
    processor: Any = SimpleNamespace(boi_token="<begin>", eoi_token="<end>", image_token="<image>")
    counts = {"num_soft_tokens_per_image": [shown.height * shown.width // 12**2]}
    return str(Gemma4Processor.replace_image_token(processor, counts, 0))


def _gemma4_family(*, whole: bool = False, **vision: Any) -> Family:
    return Family(
        architecture="Gemma4ForConditionalGeneration",
        config={
            "vision_config": {
                **VISION,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                **vision,
            },
            "image_token_id": FIRST_MARK,
            "boi_token_id": FIRST_MARK + 1,
            "eoi_token_id": FIRST_MARK + 2,
            "audio_config": None,
        },
        text_type="gemma4_text",
        marks=("<image>", "<begin>", "<end>"),
        preprocessor={"do_normalize": False, "patch_size": 4, "max_soft_tokens": 70},
        inputs=_of_gemma4,
        processor=Gemma4ImageProcessorPil,
        text=_gemma4_text,
        refused=[
            ({"patch_size": 8}, "patch_size 8 is not the one of config.json, 4"),
            ({"pooling_kernel_size": 2}, "pooling_kernel_size 2 is not the one of config.json, 3"),
            ({"max_soft_tokens": 71}, "max_soft_tokens 71 is not one of 70"),
            ({"do_normalize": True}, "do_normalize True is not supported"),
        ],
        refused_configs=[({"image_token_id": 200}, "tokenizer.json lacks the tokens of images")],
        text_config={
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 24,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "pad_token_id": 7,
            "use_bidirectional_attention": "vision" if whole else None,
        },
        typed="mm_token_type_ids" if whole else "",
    )


FAMILIES = {
    "Gemma 4": _gemma4_family(use_clipped_linears=True, standardize=True),
    "Gemma 4, whole images": _gemma4_family(whole=True),
    "Idefics3": _smolvlm_family("Idefics3"),
    "SmolVLM": _smolvlm_family("SmolVLM"),
    "InternVL": _internvl_family("qwen2", -1, use_mean_pooling=False, norm_type="rms_norm", use_qk_norm=True),
    "InternVL 3.5": _internvl_family("qwen3", -2),
    "Llama 4": _llama4_family(),
    "LLaVA": _llava_family(
        "clip_vision_model",
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 44}, "crop_size": {"height": 44, "width": 44}},
        "llama",
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    ),
    "LLaVA with SigLIP": _llava_family(
        "siglip_vision_model",
        SiglipImageProcessorPil,
        {"size": {"height": 44, "width": 44}},
        "qwen2",
        vision_feature_select_strategy="full",
        vision_feature_layer=[-1, 1],
    ),
    "LLaVA-OneVision": _onevision_family(),
    "Mistral 3": _pixtral_family("Mistral3ForConditionalGeneration", 2, spatial_merge_size=2),
    "Pixtral": _pixtral_family(
        "LlavaForConditionalGeneration", 1, vision_feature_select_strategy="full", vision_feature_layer=-1
    ),
}
