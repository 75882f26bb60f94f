"""Refusal of files, because models read text, images, clips and audio only, and of these in other places."""

from collections.abc import Collection

from tercet.frontend.errors import UnsupportedParameterError

_NOT_TEXT = frozenset(
    {
        *("image_url", "input_audio", "file", "input_image", "input_file"),
        *("image", "audio", "video", "audio_url", "video_url", "input_video"),
    }
)
"""Types of parts: first those of OpenAI's two APIs, then those of vLLM, SGLang and others."""


def refuse_non_text(parts: object, where: str, *, images: Collection[str] = ()) -> None:
    """Raise UnsupportedParameterError that names the first part that is neither text nor of a type in `images`."""
    for step, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _NOT_TEXT and kind not in images:
            raise UnsupportedParameterError(  # as models without images refuse them
                f"Content of type '{kind}' is not supported: the model takes text only.", param=f"{where}[{step}]"
            )
