"""Chat templates among a model's files, by name, and the template of `--chat-template`."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tercet.frontend.model.files import read_text, reading
from tercet.frontend.model.template_syntax import parse_template
from tercet.protocol.json_files import error_line, read_object

DEFAULT, FOR_TOOLS = "default", "tool_use"
_FOLDER, _SUFFIX = "additional_chat_templates/", ".jinja"
_MOST_BYTES = 1 << 24


class TemplateSources(NamedTuple):
    """Sources of a model's chat templates."""

    default: str | None
    """None if no template has this name, so that the model answers no chats."""
    named: Mapping[str, str]
    """Further templates, such as the one for chats with tools."""


def template_sources(files: Mapping[str, bytes], override: str | None = None) -> TemplateSources:
    """Return the templates of a model, or `override` in place of all. Raises ValueError for files that are not texts.

    A file comes before tokenizer_config.json, and that before the chat_template.json of models that see.
    """
    if override is not None:
        return TemplateSources(override, {})
    named = _listed(read_object(files, "tokenizer_config.json").get("chat_template"))
    if not named:
        named = _listed(read_object(files, "chat_template.json").get("chat_template"))
    for path in files:
        if path.startswith(_FOLDER) and path.endswith(_SUFFIX):
            named[path.removeprefix(_FOLDER).removesuffix(_SUFFIX)] = read_text(files, path)
    if "chat_template.jinja" in files:
        named[DEFAULT] = read_text(files, "chat_template.jinja")
    return TemplateSources(named.pop(DEFAULT, None), named)


def _listed(field: Any) -> dict[str, str]:
    """Return the templates of a field `chat_template`: one, a list with names, or an object by name."""
    if isinstance(field, str):
        return {DEFAULT: field}
    if isinstance(field, list):
        field = {each.get("name"): each.get("template") for each in field if isinstance(each, dict)}
    if not isinstance(field, dict):
        return {}
    return {name: text for name, text in field.items() if isinstance(name, str) and isinstance(text, str)}


def operator_template(path: Path | None) -> str | None:
    """Return the source of the template of `--chat-template`.

    Raises ValueError, in one line, for a file that cannot be read and for a template that does not parse.
    """
    if path is None:
        return None
    source = _read(path)
    try:
        with reading("the template"):
            parse_template(source)
    except ValueError as error:
        raise ValueError(f"--chat-template {path}: {error}") from error
    return source


def _read(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"--chat-template {path}: it is not a file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"--chat-template {path}: it is larger than {_MOST_BYTES} bytes")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {path}: it is not UTF-8: {error_line(error)}") from None
    except OSError as error:
        raise ValueError(f"--chat-template {path}: {error.strerror}") from None
