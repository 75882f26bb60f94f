"""Planning of a chat answer: the generate request and the parsers of its output."""

import asyncio
from collections.abc import Callable

import msgspec

from tercet.frontend.chat.answer_grammar import EnforcedCalls, Thinking, answer_grammar, composition
from tercet.frontend.chat.chat_request import Calls, ChatOptions
from tercet.frontend.chat.custom_calls import CustomCalls
from tercet.frontend.chat.images import take_images
from tercet.frontend.chat.messages import history
from tercet.frontend.chat.output_parser import OutputParser
from tercet.frontend.chat.reasoning_tokens import ReasoningTokens
from tercet.frontend.chat.template_variables import enforce_switch, template_variables
from tercet.frontend.chat.tool_prompt import for_template, with_instructions
from tercet.frontend.config.config import ServingConfig
from tercet.frontend.config.validation import AUTOMATIC, NONE
from tercet.frontend.constraints import Tokens
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.http.json_depth import MAX_JSON_DEPTH, is_within
from tercet.frontend.manager.req_state import Generation, ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.model.special_text import SpecialText, SpecialTexts
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.parsers.registry import ParserNames, make_parser, reasoning_format, tool_format
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.frontend.structured_output.composition import Composition
from tercet.frontend.structured_output.limits import MAX_TOOL_GRAMMARS
from tercet.protocol.messages.values import Grammar, unpack_ints

_PROMPT_END = 24
"""Tokens at a prompt's end that are inspected for open or closed reasoning."""


class ChatPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Generate request of one answer, and the factory of its output parsers."""

    request: GenerateRequest
    reads: bool
    """Answers may contain more than text; otherwise parsers can be skipped."""
    make_reader: Callable[[ReqState], OutputParser]

    def readers(self, generation: Generation) -> list[OutputParser]:
        """Return a parser for each choice of a generation with this plan's request only."""
        [state] = generation.states
        return [self.make_reader(state) for _ in state.choices]


class ChatPlanner:
    """Planner of answers for every model of this frontend."""

    def __init__(self, config: ServingConfig = ServingConfig()) -> None:
        self._tools, self._reasoning = config.tool_call_parser, config.reasoning_parser
        self.reasoning_field = config.reasoning_field_name
        """Name of the message field for reasoning."""

    def parsers(self, model: ServedModel) -> ParserNames:
        """Return the notations of reasoning and tool calls for this model."""
        template = model.files.template
        found = template.parsers if template else ParserNames()
        return ParserNames(
            reasoning=found.reasoning if self._reasoning == AUTOMATIC else _named(self._reasoning),
            tools=found.tools or "generic" if self._tools == AUTOMATIC else _named(self._tools),
        )

    async def plan(self, turn: ChatOptions, model: ServedModel) -> ChatPlan:
        """Plan an answer. Raises BadRequestError."""
        names = self.parsers(model)
        tools = _checked_tools(turn, names)
        if not tools:
            names = ParserNames(names.reasoning, None)
        if turn.thinking_budget is not None and names.reasoning is None:
            raise UnsupportedParameterError(
                "This model has no reasoning to limit.", param=turn.options.param_names.thinking_budget
            )
        prompt = _prompt(turn, model, names)
        turn = enforce_switch(turn, model.files.template, reasons=names.reasoning is not None)
        special = _keeps_special_tokens(names, model.files.special_texts)
        hidden = special and turn.options.skip_special_tokens
        tokens = model.tokens
        customs = frozenset(tool.name for tool in turn.tools if tool.custom)
        grammar, parts = await _grammar(turn, model, names, tools, prompt)

        def make_reader(state: ReqState) -> OutputParser:
            end = _end_of_prompt(state) if names.reasoning else ""
            return OutputParser(
                make_parser(names, tools, end),
                SpecialText(model.files.special_texts) if hidden else None,
                _reasoning_tokens(names, model, end),
                customs=CustomCalls(customs) if customs else None,
                call_end=_call_end(names, tokens),
                one_call=not turn.parallel_tool_calls,
                short_ids=bool(names.tools and tool_format(names.tools).framing.short_ids),
            )

        return ChatPlan(
            request=GenerateRequest(
                model=model.base,
                lora=model.lora,
                prompt=prompt,
                options=msgspec.structs.replace(
                    turn.options,
                    skip_special_tokens=turn.options.skip_special_tokens and not special,
                    param_names=msgspec.structs.replace(turn.options.param_names, grammar=_grammar_param(turn)),
                ),
                stops_in_special_tokens=not hidden,
                grammar=grammar,
                composition=parts,
                trials=_trials(turn, model),
            ),
            reads=names != ParserNames(),
            make_reader=make_reader,
        )


async def _grammar(
    turn: ChatOptions, model: ServedModel, names: ParserNames, tools: tuple[ToolSpec, ...], prompt: ChatPrompt
) -> tuple[Grammar | None, Composition | None]:
    """Return the grammar to enforce and its parts; None if nothing is constrained."""
    required = turn.tool_choice.calls is Calls.REQUIRED
    constraint = None if required else turn.constraint
    enforced = required or turn.tool_choice.names is not None or any(tool.strict for tool in tools)
    if constraint is None and turn.thinking_budget is None and not (tools and enforced):
        return None, None
    calls = None
    if names.tools and (enforced or constraint is not None):
        framing = tool_format(names.tools).framing
        calls = EnforcedCalls(framing=framing, tools=tools, required=required, several=turn.parallel_tool_calls)
    thinking = None
    if names.reasoning is not None:
        # The template determines from the whole chat whether reasoning is open.
        end = await model.render_end(prompt)
        form = reasoning_format(names.reasoning)
        if not form.closed(end):
            thinking = Thinking(framing=form.framing, opened=form.opened(end), budget=turn.thinking_budget)
    if thinking is None and calls is None and constraint is None:
        return None, None
    grammar = await asyncio.to_thread(answer_grammar, model.tokens, thinking, calls, constraint)
    return grammar, composition(model.tokens, thinking, calls, constraint)


def _trials(turn: ChatOptions, model: ServedModel) -> list[tuple[Grammar, str]]:
    """Return the grammars of all custom tools, enforced or not. Raises BadRequestError beyond the limits."""
    asked = [tool.grammar for tool in turn.tools if tool.grammar is not None]
    if len(asked) > MAX_TOOL_GRAMMARS:
        raise BadRequestError(f"More than {MAX_TOOL_GRAMMARS} custom tools have a grammar.", param="tools")
    return [(to_grammar(each, model.tokens), each.param) for each in asked]


def _grammar_param(turn: ChatOptions) -> str:
    """Return the parameter to name when the grammar is refused; a format takes precedence over tools."""
    if turn.constraint is not None and turn.tool_choice.calls is not Calls.REQUIRED:
        return turn.constraint.param
    return "tools" if turn.tools else turn.options.param_names.thinking_budget


def _named(option: str) -> str | None:
    return None if option == NONE else option


def _checked_tools(turn: ChatOptions, names: ParserNames) -> tuple[ToolSpec, ...]:
    """Return the callable tools. Raises BadRequestError for a choice of tools that do not exist."""
    choice, known = turn.tool_choice, {tool.name: tool.custom for tool in turn.tools}
    if len(known) < len(turn.tools):
        raise BadRequestError("Two tools have the same name.", param="tools")
    if deep := [tool.name for tool in turn.tools if not is_within(tool.parameters, MAX_JSON_DEPTH)]:
        raise BadRequestError(
            f"The schema of {deep[0]!r} is nested deeper than {MAX_JSON_DEPTH} levels.", param="tools"
        )
    if strangers := sorted(each for each in choice.names or () if known.get(each) is not (each in choice.customs)):
        raise BadRequestError(f"'tool_choice' names {strangers[0]!r}, which is not in 'tools'.", param="tool_choice")
    tools = turn.callable_tools
    if choice.calls is Calls.REQUIRED and not tools:
        raise BadRequestError("'tool_choice' requires a call, and there is no tool to call.", param="tool_choice")
    if tools and names.tools is None:
        raise UnsupportedParameterError("This server reads no tool calls from this model's answers.", param="tools")
    return tools


def _prompt(turn: ChatOptions, model: ServedModel, names: ParserNames) -> ChatPrompt:
    """Return the input of the template, without tools if calls are disabled."""
    template = model.files.template
    param = turn.options.param_names.messages
    messages, images = take_images(history(turn.messages), param, model)
    tools = turn.tools if turn.tool_choice.calls is not Calls.NONE else ()
    if tools and template is not None and not template.supports_tools:
        messages = with_instructions(messages, tools, names.tools)
    return ChatPrompt(
        messages=messages,
        tools=for_template(tools) if tools else None,
        add_generation_prompt=turn.add_generation_prompt,
        continue_final_message=turn.continue_final_message,
        kwargs=template_variables(
            turn, template.variables if template else frozenset(), reasons=names.reasoning is not None
        ),
        param=param,
        images=images,
    )


def _keeps_special_tokens(names: ParserNames, specials: SpecialTexts) -> bool:
    """Return whether the parsers need special tokens in the decoded text."""
    if names.tools:
        tools = tool_format(names.tools).framing
        calls = (tools.begin, tools.prefix, tools.suffix, tools.separator, tools.end)
        values = (tools.key_prefix, tools.key_suffix, tools.string_begin, tools.string_end, tools.other_begin)
        if tools.special_tokens or any(map(specials.occur_in, (*calls, *values))):
            return True
    if names.reasoning:
        form = reasoning_format(names.reasoning)
        return form.special_tokens or any(map(specials.occur_in, (form.framing.begin, form.framing.end)))
    return False


def _reasoning_tokens(names: ParserNames, model: ServedModel, prompt: str) -> ReasoningTokens | None:
    if names.reasoning is None:
        return None
    form = reasoning_format(names.reasoning)
    if form.closed(prompt):
        return None
    return ReasoningTokens(model.files.token_bytes, form.framing, opened=form.opened(prompt))


def _call_end(names: ParserNames, tokens: Tokens) -> int | None:
    """Return the stop token that ends a call, if the notation has one."""
    token_id = tokens.added.get(tool_format(names.tools).framing.suffix) if names.tools else None
    return token_id if token_id in tokens.eos else None


def _end_of_prompt(state: ReqState) -> str:
    """Decode the last tokens of the prompt."""
    ids = unpack_ints(state.prompt_ids)[-_PROMPT_END:]
    return state.model.tokenizer.decode(list(ids), skip_special_tokens=False)
