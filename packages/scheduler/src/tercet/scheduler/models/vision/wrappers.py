"""Images of text models that several models wrap: the wrapper's architecture decides."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tercet.scheduler.architectures import named_architecture
from tercet.scheduler.model_files import read_json
from tercet.scheduler.models.vision import gemma4, idefics3, internvl, llama4, llava, llava_onevision, pixtral
from tercet.scheduler.models.vision.image_model import ImageModel

_IMAGES: Mapping[str, Callable[[Path], ImageModel | None]] = {
    "Gemma4ForConditionalGeneration": gemma4.image_model,
    "Idefics3ForConditionalGeneration": idefics3.image_model,
    "InternVLForConditionalGeneration": internvl.image_model,
    "Llama4ForConditionalGeneration": llama4.image_model,
    "LlavaForConditionalGeneration": llava.image_model,
    "LlavaOnevisionForConditionalGeneration": llava_onevision.image_model,
    "Mistral3ForConditionalGeneration": pixtral.image_model,
    "SmolVLMForConditionalGeneration": idefics3.image_model,
}


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None if its architecture reads text only. Raise ModelError."""
    images = _IMAGES.get(named_architecture(read_json(directory / "config.json")))
    return None if images is None else images(directory)
