"""Images, clips and sounds in chat messages: parts of type `image_url` and `input_audio`, as OpenAI's API has them, and
`video_url`, as vLLM's and SGLang's have it.
"""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.media.image_decoder import ImageSource
from tercet.frontend.media.prompt_media import Source
from tercet.frontend.media.sound_decoder import SoundSource
from tercet.frontend.media.video.decoder import VideoSource
from tercet.frontend.model.message_form import IMAGE, SOUND, VIDEO
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import ModelLimits

MAX_IMAGES = 32
"""Maximum images, clips or sounds of a request, whose arrays its frontend and its scheduler hold."""
_KINDS = {"image_url": IMAGE, "video_url": VIDEO, "input_audio": SOUND}
Message = dict[str, Any]


def take_images(messages: list[Message], param: str, model: ServedModel) -> tuple[list[Message], list[Source]]:
    """Return the messages with an empty part in the place of each image, clip or sound, and these.

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
    if part["type"] == "video_url":
        return VideoSource(url=part["video_url"]["url"], param=where)
    return SoundSource(base64=part["input_audio"]["data"], param=where)


def check_images(images: Sequence[Source], param: str, model: ServedModel) -> None:
    """Raise UnsupportedParameterError if the model takes no such media, and BadRequestError for too many."""
    limits = model.limits
    for kind, form, name in (
        (ImageSource, limits.images, "Images are"),
        (VideoSource, limits.video, "Videos are"),
        (SoundSource, limits.sounds, "Content of type 'input_audio' is"),
    ):
        refused = next((each for each in images if isinstance(each, kind)), None)
        if refused is not None and form is None:
            raise UnsupportedParameterError(
                f"{name} not supported: the model takes {_taken(limits)} only.", param=refused.param
            )
    if len(images) > MAX_IMAGES:
        nouns = ((ImageSource, "images"), (VideoSource, "videos"), (SoundSource, "audio clips"))
        own = " or ".join(noun for kind, noun in nouns if any(isinstance(each, kind) for each in images))
        raise BadRequestError(f"At most {MAX_IMAGES} {own} are possible in a request.", param=param)


def _taken(limits: ModelLimits) -> str:
    """Return the kinds of content that a model takes."""
    forms = {"images": limits.images, "videos": limits.video, "audio": limits.sounds}
    others = [name for name, form in forms.items() if form is not None]
    return " and ".join([", ".join(["text", *others[:-1]]), *others[-1:]])
