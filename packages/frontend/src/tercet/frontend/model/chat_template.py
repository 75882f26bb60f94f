"""Chat templates: messages, tools and variables to text.

Templates come from the model's directory only, never from a request.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.message_form import escaped, find_form
from tercet.frontend.model.message_shape import find_shape
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.model.template_files import DEFAULT, FOR_TOOLS, template_sources
from tercet.frontend.model.template_syntax import RefusalError, parse_template
from tercet.frontend.model.tool_place import PROBE_TOOLS, ToolPlace, find_place, place_tools
from tercet.frontend.parsers.registry import ParserNames, detect
from tercet.protocol.json_files import read_object

_END = "\ufdd2end of the message to continue\ufdd3"
TEMPLATE_NAME = "chat_template"
"""Variable of a request that names one of the model's templates, as in transformers' `apply_chat_template`."""
_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
"""Exceptions that a template raises for messages that it was not written for."""
_MAX_REASON = 1000
"""Characters of a template's reason for a refusal: some repeat a whole message."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateManager:
    """Chat template of one model. Thread-safe. Raises ValueError for a template that does not parse.

    Some models have further templates, in `named`. "tool_use" is that of chats with tools.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], named: Mapping[str, str] | None = None) -> None:
        parsed = parse_template(source)
        self._template = parsed.template
        self._special_tokens = special_tokens
        self.variables = parsed.variables - (_ARGUMENTS - {"documents"}) - special_tokens.keys()
        """Variables of the template that a request may set."""
        reads_tools = parsed.reads_tools or "tools" in parsed.words
        self._tool_place = find_place(self._render_probe) if reads_tools else ToolPlace.NOWHERE
        self.parsers: ParserNames = detect(source)
        """Parsers for the notation of reasoning and tool calls in this template."""
        self._form = find_form(self._render_probes, parsed.words, self.parsers.tools)
        self._shape = find_shape(self._render_messages, knows_developer=self._form.developer == "developer")
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
        messages = [self._form.convert(message, escape) for message in self._shape.apply(prompt.messages)]
        tools = escaped(prompt.tools, escape)
        messages = place_tools(messages, tools, self._tool_place)
        if prompt.continue_final_message:
            messages[-1] = _with_end(messages[-1])
        variables = {name: escaped(value, escape) for name, value in prompt.kwargs.items() if name != TEMPLATE_NAME}
        try:
            text = self._template.render(
                **self._special_tokens,
                **{"documents": None, **variables},
                messages=messages,
                tools=tools,
                add_generation_prompt=prompt.add_generation_prompt,
            )
        except RefusalError as refusal:
            raise BadRequestError(
                f"The model's chat template refuses these messages: {str(refusal)[:_MAX_REASON]}", param="messages"
            ) from None
        except _FAILURES as error:
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

    def _render_messages(self, messages: Sequence[dict[str, Any]]) -> str | None:
        return self._render_probes([self._form.convert(message, str) for message in messages])

    def _render_probes(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Render messages in the template's form; None if the template fails.

        Some templates render calls only beside tools, as most requests have them.
        """
        rendered = None
        if self._tool_place is not ToolPlace.NOWHERE and any("tool_calls" in message for message in messages):
            rendered = self._render_probe(place_tools([*messages], PROBE_TOOLS, self._tool_place), PROBE_TOOLS)
        return self._render_probe(messages, None) if rendered is None else rendered

    def _render_probe(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._template.render(
                **self._special_tokens, messages=messages, tools=tools, add_generation_prompt=True
            )
        except Exception:
            # Any failure of a third-party template on the probe means that it does not support the form.
            return None


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
