"""The config of a model's image processor, and the tokens of images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tercet.scheduler.model_files import ModelError, read_json, tokenizer_files
from tercet.scheduler.tokenizer_files import added_token_texts

FILE, _COMMON_FILE = "preprocessor_config.json", "processor_config.json"
_USUAL = {"do_resize": True, "do_rescale": True, "do_normalize": True}
CLIP_MEAN = 0.48145466, 0.4578275, 0.40821073
CLIP_STD = 0.26862954, 0.26130258, 0.27577711
BICUBIC = 3
"""Defaults of most image processors."""


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


def resample_of(processor: Mapping[str, Any], usual: int) -> int:
    """Return the number of a processor's filter in Pillow, by default the family's."""
    number = processor.get("resample")
    return usual if number is None else int(number)


def token_texts(directory: Path, ids: Sequence[int]) -> list[str]:
    """Return the texts of tokens of images. Raise ModelError for one that the tokenizer lacks."""
    texts = added_token_texts(tokenizer_files(directory))
    if lacking := [each for each in ids if each not in texts]:
        raise ModelError(f"tokenizer.json lacks the tokens of images, which are {lacking} in config.json")
    return [texts[each] for each in ids]


def image_token(directory: Path, config: Mapping[str, Any], usual: int) -> tuple[int, str]:
    """Return id and text of the placeholder token of images. Raise ModelError if the tokenizer lacks it."""
    token_id = config.get("image_token_index") or config.get("image_token_id") or usual
    [text] = token_texts(directory, [token_id])
    return token_id, text


def check_token_texts(directory: Path, texts: Sequence[str]) -> None:
    """Raise ModelError for a text around images that is no token of the tokenizer."""
    known = added_token_texts(tokenizer_files(directory)).values()
    if lacking := [text for text in texts if text not in known]:
        raise ModelError(f"tokenizer.json lacks the tokens {', '.join(lacking)} of images")


def check_size(processor: Mapping[str, Any], side: int) -> None:
    """Raise ModelError for a processor whose images are no squares of the tower's `side`."""
    size = processor.get("size") or {}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ModelError(f"{FILE}: size {size} is not the image_size {side} of config.json")


def side_of(config: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    """Return the side of squares that a field of a vision config has as one number or as two equal ones.

    Raise ModelError for any other value.
    """
    value = config.get(name) or usual
    if isinstance(value, list | tuple) and len({*value}) == 1:
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: vision_config.{name}: {value!r} is not supported, only a square's side")
    return value
