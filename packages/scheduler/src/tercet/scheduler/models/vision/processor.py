"""The config of a model's image processor, and the tokens of images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tercet.scheduler.model_files import ModelError, read_json, tokenizer_files
from tercet.scheduler.tokenizer_files import added_token_texts

FILE, _COMMON_FILE = "preprocessor_config.json", "processor_config.json"
_USUAL = {"do_resize": True, "do_rescale": True, "do_normalize": True}


class Normalization(NamedTuple):
    """The numbers that make pixels of bytes: a factor, then mean and standard deviation of each channel."""

    factor: float
    mean: Sequence[float]
    std: Sequence[float]


def read_processor(directory: Path, usual: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return the config of the image processor of a model in a directory, which may be in a file with the tokenizer's.

    Return None for a text model, or if there is no config. Raise ModelError for an option, of all models or of `usual`,
    that has another value than the usual one.
    """
    if not isinstance(read_json(directory / "config.json").get("vision_config"), dict):
        return None
    if (directory / FILE).is_file():
        processor: Any = read_json(directory / FILE)
    elif (directory / _COMMON_FILE).is_file():  # transformers 5 writes it
        processor = read_json(directory / _COMMON_FILE).get("image_processor")
    else:
        return None
    if not isinstance(processor, dict):
        return None
    for name, value in {**_USUAL, **(usual or {})}.items():
        if processor.get(name) not in (value, None):
            raise ModelError(f"{FILE}: {name} {processor[name]!r} is not supported")
    return processor


def normalization_of(processor: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> Normalization:
    """Return the numbers of a processor, by default the family's mean and standard deviation."""
    factor = processor.get("rescale_factor") or 1 / 255
    return Normalization(factor, processor.get("image_mean") or mean, processor.get("image_std") or std)


def token_texts(directory: Path, ids: Sequence[int]) -> list[str]:
    """Return the texts of tokens of images. Raise ModelError for one that the tokenizer lacks."""
    texts = added_token_texts(tokenizer_files(directory))
    if lacking := [each for each in ids if each not in texts]:
        raise ModelError(f"tokenizer.json lacks the tokens of images, which are {lacking} in config.json")
    return [texts[each] for each in ids]
