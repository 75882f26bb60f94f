"""Pictures in chat messages: parts of type `image_url`, as OpenAI's API has them."""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.media.decoder import PictureSource
from tercet.frontend.model.message_form import PICTURE
from tercet.frontend.model.served_model import ServedModel

MAX_PICTURES = 32
"""Maximum pictures of a request, whose arrays its frontend and its scheduler hold."""
Message = dict[str, Any]


def take_pictures(messages: list[Message], param: str, model: ServedModel) -> tuple[list[Message], list[PictureSource]]:
    """Return the messages with an empty part in the place of each picture, and the pictures.

    A part may have the client's name for it in `param`.
    Raises UnsupportedParameterError if the model takes none, and BadRequestError for too many.
    """
    pictures: list[PictureSource] = []
    taken: list[Message] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] == "image_url" for part in content):
            parts = []
            for step, part in enumerate(content):
                if part["type"] == "image_url":
                    where = part.get("param") or f"{param}[{place}].content[{step}]"
                    pictures.append(PictureSource(url=part["image_url"]["url"], param=where))
                    parts.append(PICTURE)
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    check_pictures(pictures, param, model)
    return taken, pictures


def check_pictures(pictures: Sequence[PictureSource], param: str, model: ServedModel) -> None:
    """Raise UnsupportedParameterError if the model takes no pictures, and BadRequestError for too many."""
    if pictures and model.limits.pictures is None:
        raise UnsupportedParameterError("Images are not supported: the model takes text only.", param=pictures[0].param)
    if len(pictures) > MAX_PICTURES:
        raise BadRequestError(f"At most {MAX_PICTURES} images are possible in a request.", param=param)
