"""Chat templates: sandboxed jinja2 with the functions and filters that templates of the Hub expect.

Templates come from the model's directory only, never from a request.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tercet.frontend.errors import BadRequestError
from tercet.frontend.json_number import json_text
from tercet.frontend.model.files import reading
from tercet.frontend.model.message_shape import find_shape
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.model.template_files import DEFAULT, FOR_TOOLS, read_template, template_sources
from tercet.frontend.model.tool_place import ToolPlace, find_place, place_tools
from tercet.frontend.parsers.registry import ParserNames, detect
from tercet.protocol.json_files import read_object

_PROBE = "tercet-probe"
_END = "\ufdd2end of the message to continue\ufdd3"
_TEMPLATE_KEYS = frozenset(
    {
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "arguments",
        "id",
        "properties",
        "required",
        "items",
        "enum",
        "default",
        "title",
        "format",
        "additionalProperties",
        "anyOf",
        "allOf",
        "oneOf",
        "const",
        "$ref",
        "$defs",
        "nullable",
        "minimum",
        "maximum",
    }
)
"""Keys of tools, calls and schemas that templates look up; all other keys are client text."""
TEMPLATE_NAME = "chat_template"
"""Variable of a request that names one of the model's templates, as in transformers' `apply_chat_template`."""
_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _CallForm(NamedTuple):
    """Form in which a template expects messages with tool calls."""

    content: str | None
    """Content of a message that has only tool calls."""
    arguments_as_text: bool


_CALL_FORMS = [_CallForm("", False), _CallForm("", True), _CallForm(None, False), _CallForm(None, True)]
"""Candidates, in order of preference."""


class _RefusalError(Exception):
    """A template called `raise_exception`, with a reason for the client."""


class _GenerationBlock(Extension):
    """Jinja extension that renders the body of `{% generation %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _RefusalError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes of jinja2's own filter."""
    return json_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class TemplateManager:
    """Chat template of one model. Thread-safe. Raises ValueError for a template that does not parse.

    Some models have further templates, in `named`. "tool_use" is that of chats with tools.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], named: Mapping[str, str] | None = None) -> None:
        try:
            self._template = _environment().from_string(source)
        except (TemplateSyntaxError, SyntaxError, RecursionError) as error:  # jinja2 compiles templates to Python
            raise ValueError(f"the chat template does not parse: {error}") from error
        self._special_tokens = special_tokens
        self.variables = frozenset(re.findall(r"[A-Za-z_]\w*", source))
        """Every identifier in the template's source."""
        self.parsers: ParserNames = detect(source)
        """Parsers for the notation of reasoning and tool calls in this template."""
        self._supports_developer = "developer" in self.variables
        self._content_as_parts = not self._renders_probe(_PROBE) and self._renders_probe(
            [{"type": "text", "text": _PROBE}]
        )
        self._call_form = next(filter(self._renders_call, _CALL_FORMS), _CALL_FORMS[0])
        self._shape = find_shape(self._render_probes, knows_developer=self._supports_developer)
        self._tool_place = find_place(self._rendered) if "tools" in self.variables else ToolPlace.NOWHERE
        self._named = {name: TemplateManager(text, special_tokens) for name, text in (named or {}).items()}
        self._for_tools = self._named.get(FOR_TOOLS)
        if self._for_tools is not None:
            self.variables |= self._for_tools.variables
            self.parsers = ParserNames(self.parsers.reasoning, self._for_tools.parsers.tools or self.parsers.tools)

    @property
    def supports_tools(self) -> bool:
        if self._for_tools is not None:
            return self._for_tools.supports_tools
        return self._tool_place is not ToolPlace.NOWHERE

    @classmethod
    def from_files(cls, files: dict[str, bytes], override: str | None = None) -> "TemplateManager | None":
        """Load the templates from a model's files, or `override` in their place; None without a default one.

        Raises ValueError for a template that does not parse.
        """
        sources = template_sources(files, override)
        if sources.default is None:
            return None
        config, special_map = (
            read_object(files, f"{name}.json") for name in ("tokenizer_config", "special_tokens_map")
        )
        return cls(sources.default, _special_tokens(config, special_map), sources.named)

    def render(self, prompt: ChatPrompt, escape: Callable[[str], str] = str) -> str:
        """Render a chat, applying `escape` to every text of the client. Raises BadRequestError."""
        return self._chosen(prompt)._render(prompt, escape)

    def _chosen(self, prompt: ChatPrompt) -> "TemplateManager":
        """Return the template that a request names, or the one for its tools. Raises BadRequestError."""
        name = prompt.kwargs.get(TEMPLATE_NAME)
        if name is None:
            return self._for_tools if prompt.tools and self._for_tools is not None else self
        templates = {DEFAULT: self, **self._named}
        if name not in templates:
            raise BadRequestError(
                f"The model has no chat template {name!r}, only {', '.join(templates)}.",
                param=f"chat_template_kwargs.{TEMPLATE_NAME}",
            )
        return templates[name]

    def _render(self, prompt: ChatPrompt, escape: Callable[[str], str]) -> str:
        messages = [self._message(message, escape) for message in self._shape.apply(prompt.messages)]
        tools = _escaped(prompt.tools, escape)
        messages = place_tools(messages, tools, self._tool_place)
        if prompt.continue_final_message:
            messages[-1] = _with_end(messages[-1])
        try:
            text = self._template.render(
                **self._special_tokens,
                **{name: _escaped(value, escape) for name, value in prompt.kwargs.items() if name != TEMPLATE_NAME},
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt.add_generation_prompt,
            )
        except _RefusalError as refusal:
            raise BadRequestError(
                f"The model's chat template refuses these messages: {refusal}", param="messages"
            ) from None
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise BadRequestError(
                "The model's chat template cannot render these messages.", param="messages"
            ) from error
        if not prompt.continue_final_message:
            return text
        kept, end, _ = text.rpartition(_END)
        if not end:
            raise BadRequestError(
                "The model's chat template leaves out the final message.", param="continue_final_message"
            )
        return kept

    def _message(self, message: dict[str, Any], escape: Callable[[str], str]) -> dict[str, Any]:
        """Convert a message to the roles and the form of content that the template supports."""
        shaped = {key: _escaped(value, escape) for key, value in message.items() if key not in {"role", "content"}}
        role = message["role"]
        shaped["role"] = "system" if role == "developer" and not self._supports_developer else role
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if calls := shaped.get("tool_calls"):
            content = content or self._call_form.content
            if self._call_form.arguments_as_text:
                shaped["tool_calls"] = [_with_text_arguments(call) for call in calls]
        if content is not None:
            content = escape(content)
        shaped["content"] = (
            [{"type": "text", "text": content}] if self._content_as_parts and content is not None else content
        )
        return shaped

    def _renders_call(self, form: _CallForm) -> bool:
        """Return whether the template renders a call with its arguments when given this form."""
        arguments: object = _tojson({"text": _PROBE}) if form.arguments_as_text else {"text": _PROBE}
        call = {"id": "probe1234", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": form.content, "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "probe", "tool_call_id": "probe1234"},
        ]
        text = self._rendered(messages)
        # Doubly encoded JSON or a Python repr is not the format that the model was trained on.
        return text is not None and _PROBE in text and '\\"text' not in text and "'text'" not in text

    def _renders_probe(self, content: object) -> bool:
        """Return whether the template renders the text of a user message with this content."""
        text = self._rendered([{"role": "user", "content": content}])
        return text is not None and _PROBE in text and "'type'" not in text

    def _render_probes(self, messages: Sequence[dict[str, Any]]) -> str | None:
        return self._rendered([self._message(message, str) for message in messages])

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str | None:
        """Render a probe chat; None if the template fails."""
        try:
            return self._template.render(
                **self._special_tokens, messages=messages, tools=tools, add_generation_prompt=True
            )
        except Exception:
            # Any failure of a third-party template on the probe means that it does not support the form.
            return None


def operator_template(path: Path | None) -> str | None:
    """Return the source of the template of `--chat-template`. Raises ValueError, in one line, if it is of no use."""
    if path is None:
        return None
    source = read_template(path)
    with reading(str(path)):
        try:
            TemplateManager(source, {})
        except ValueError as error:
            raise ValueError(f"--chat-template {path}: {error}") from error
    return source


def _escaped(value: Any, escape: Callable[[str], str]) -> Any:
    match value:
        case str():
            return escape(value)
        case dict():
            return {
                key if key in _TEMPLATE_KEYS else escape(key): _escaped(each, escape) for key, each in value.items()
            }
        case list():
            return [_escaped(each, escape) for each in value]
    return value


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as JSON text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


def _with_end(message: dict[str, Any]) -> dict[str, Any]:
    """Append a marker to the message, so that the rendered text can be cut there."""
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": content[0]["text"] + _END}]}
    return {**message, "content": (content or "") + _END}


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens by the names that templates use.

    Like in transformers, special_tokens_map.json counts if tokenizer_config.json has no table of tokens, and an object
    of further tokens names each.
    """
    values = config if "added_tokens_decoder" in config else {**config, **special_map}
    named = {name: values.get(name) for name in _TOKENS}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(further := values.get(name), dict):
            named |= further
    texts = {name: _token_text(value) for name, value in named.items() if name.isidentifier()}
    return {name: text for name, text in texts.items() if text is not None and name not in _ARGUMENTS}


def _token_text(value: object) -> str | None:
    """Return the text of a special token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
