"""Images and sounds in chat messages: parts of type `image_url` and `input_audio`, as OpenAI's API has them."""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.media.image_decoder import ImageSource
from tercet.frontend.media.prompt_media import Source
from tercet.frontend.media.sound_decoder import SoundSource
from tercet.frontend.model.message_form import IMAGE, SOUND
from tercet.frontend.model.served_model import ServedModel

MAX_IMAGES = 32
"""Maximum images or sounds of a request, whose arrays its frontend and its scheduler hold."""
_KINDS = {"image_url": IMAGE, "input_audio": SOUND}
Message = dict[str, Any]


def take_images(messages: list[Message], param: str, model: ServedModel) -> tuple[list[Message], list[Source]]:
    """Return the messages with an empty part in the place of each image or sound, and the images or sounds.

    A part may have the client's name for it in `param`.
    Raises UnsupportedParameterError if the model takes none, and BadRequestError for too many.
    """
    images: list[Source] = []
    taken: list[Message] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] in _KINDS for part in content):
            parts = []
            for step, part in enumerate(content):
                if (kind := part["type"]) in _KINDS:
                    images.append(_source(part, part.get("param") or f"{param}[{place}].content[{step}]"))
                    parts.append(_KINDS[kind])
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    check_images(images, param, model)
    return taken, images


def _source(part: Message, where: str) -> Source:
    if part["type"] == "image_url":
        return ImageSource(url=part["image_url"]["url"], param=where)
    return SoundSource(base64=part["input_audio"]["data"], param=where)


def check_images(images: Sequence[Source], param: str, model: ServedModel) -> None:
    """Raise UnsupportedParameterError if the model takes no such images or sounds, and BadRequestError for too many."""
    shown = next((each for each in images if isinstance(each, ImageSource)), None)
    heard = next((each for each in images if isinstance(each, SoundSource)), None)
    if shown is not None and model.limits.images is None:
        others = "text only" if model.limits.sounds is None else "text and audio only"
        raise UnsupportedParameterError(f"Images are not supported: the model takes {others}.", param=shown.param)
    if heard is not None and model.limits.sounds is None:
        others = "text only" if model.limits.images is None else "text and images only"
        raise UnsupportedParameterError(
            f"Content of type 'input_audio' is not supported: the model takes {others}.", param=heard.param
        )
    if len(images) > MAX_IMAGES:
        noun = "images" if heard is None else "audio clips"
        raise BadRequestError(f"At most {MAX_IMAGES} {noun} are possible in a request.", param=param)
