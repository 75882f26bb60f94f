"""Images in chat messages: parts of type `image_url`, as OpenAI's API has them."""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.media.image_decoder import ImageSource
from tercet.frontend.model.message_form import IMAGE
from tercet.frontend.model.served_model import ServedModel

MAX_IMAGES = 32
"""Maximum images of a request, whose arrays its frontend and its scheduler hold."""
Message = dict[str, Any]


def take_images(messages: list[Message], param: str, model: ServedModel) -> tuple[list[Message], list[ImageSource]]:
    """Return the messages with an empty part in the place of each image, and the images.

    A part may have the client's name for it in `param`.
    Raises UnsupportedParameterError if the model takes none, and BadRequestError for too many.
    """
    images: list[ImageSource] = []
    taken: list[Message] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] == "image_url" for part in content):
            parts = []
            for step, part in enumerate(content):
                if part["type"] == "image_url":
                    where = part.get("param") or f"{param}[{place}].content[{step}]"
                    images.append(ImageSource(url=part["image_url"]["url"], param=where))
                    parts.append(IMAGE)
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    check_images(images, param, model)
    return taken, images


def check_images(images: Sequence[ImageSource], param: str, model: ServedModel) -> None:
    """Raise UnsupportedParameterError if the model takes no images, and BadRequestError for too many."""
    if images and model.limits.images is None:
        raise UnsupportedParameterError("Images are not supported: the model takes text only.", param=images[0].param)
    if len(images) > MAX_IMAGES:
        raise BadRequestError(f"At most {MAX_IMAGES} images are possible in a request.", param=param)
