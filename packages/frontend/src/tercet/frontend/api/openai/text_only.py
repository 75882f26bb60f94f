"""What a message may be made of: models here read text, and nothing else."""

from tercet.frontend.errors import UnsupportedParameterError

_NOT_TEXT = frozenset(
    {
        *("image_url", "input_audio", "file", "input_image", "input_file"),
        *("image", "audio", "video", "audio_url", "video_url", "input_video"),
    }
)
"""Types of parts: OpenAI's two APIs' first, then those that this field's servers add."""


def refuse_what_is_no_text(parts: object, where: str) -> None:
    """Raise UnsupportedParameterError, naming it, for the first part that is a picture, a sound or a file."""
    for step, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _NOT_TEXT:
            raise UnsupportedParameterError(
                f"Content of type '{kind}' is not supported: the model takes text only.", param=f"{where}[{step}]"
            )
