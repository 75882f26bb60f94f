"""SGLang's endpoints that parse the text of an answer: tool calls and reasoning."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import Strict
from tercet.frontend.api.openai.tool_schema import Tools, specs_of
from tercet.frontend.chat.output_parser import merge_steps
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.json_response import json_in_turn
from tercet.frontend.http.loop_turns import Steps, turns_of
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.lora.registry import AdapterRegistry
from tercet.frontend.parsers.events import Event, ReasoningDelta, TextDelta
from tercet.frontend.parsers.port import Parser, ToolSpec
from tercet.frontend.parsers.registry import ParserNames, make_parser, reasoning_format
from tercet.frontend.parsers.sglang_names import REASONING_PARSERS, TOOL_PARSERS

_PIECE = 512
"""Characters that are parsed in one step."""
_BLOCK_TYPES: dict[type[Event], str] = {ReasoningDelta: "reasoning", TextDelta: "text"}

ParserName = Annotated[str, Field(min_length=1, max_length=64)]
AnswerText = Annotated[str, Field(max_length=4_194_304)]


class ParseFunctionCall(Strict):
    """Text with tool calls; without a parser's name, in the notation of the first model."""

    text: AnswerText
    tools: Tools | None = None
    tool_call_parser: ParserName | None = None


class SeparateReasoning(Strict):
    """Text with reasoning, in the notation of a parser."""

    text: AnswerText
    reasoning_parser: ParserName
    return_blocks: bool | None = None


class ParseRoutes:
    """Endpoints that parse text. No model computes."""

    def __init__(self, adapters: AdapterRegistry, planner: ChatPlanner, body_limit: int) -> None:
        self._adapters = adapters
        self._planner = planner
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/parse_function_call", self.parse_function_call),
            Route("POST", "/separate_reasoning", self.separate_reasoning),
        ]

    async def parse_function_call(self, request: Request) -> Response:
        """Return the tool calls of a text, and the text around them."""
        body = await read_model(request, ParseFunctionCall, self._body_limit)
        name = body.tool_call_parser
        if name is None:
            name = self._planner.parsers(await self._adapters.model_or_first(None)).tools or "generic"
        parser = _parser(
            ParserNames(tools=TOOL_PARSERS.get(name, name)), "tool_call_parser", specs_of(body.tools or ())
        )
        found = await turns_of(request).run(caller_of(request).owner, _function_calls(parser, body.text))
        return await json_in_turn(request, found)

    async def separate_reasoning(self, request: Request) -> Response:
        """Return the reasoning of a text and the rest, also as blocks in their order."""
        body = await read_model(request, SeparateReasoning, self._body_limit)
        name = REASONING_PARSERS.get(body.reasoning_parser, body.reasoning_parser)
        parser = _parser(ParserNames(reasoning=name), "reasoning_parser", text=body.text)
        steps = _separated(parser, body.text, blocks=bool(body.return_blocks))
        return await json_in_turn(request, await turns_of(request).run(caller_of(request).owner, steps))


def _parser(names: ParserNames, param: str, tools: Sequence[ToolSpec] = (), text: str = "") -> Parser:
    """Return a parser. Reasoning in a text that only ends it was opened by the prompt.

    Raises BadRequestError, which names `param`, for an unknown name.
    """
    try:
        prompt = ""
        if names.reasoning:
            framing = reasoning_format(names.reasoning).framing
            prompt = framing.begin if framing.begin not in text and framing.end in text else ""
        parser = make_parser(names, tools, prompt)
    except ValueError as error:
        raise BadRequestError(f"There is {error}.", param=param, code="invalid_value") from None
    assert parser is not None
    return parser


def _parse(parser: Parser, text: str) -> Steps[list[Event]]:
    events: list[Event] = []
    for start in range(0, len(text), _PIECE):
        events += parser.feed(text[start : start + _PIECE])
        yield
    return events + parser.finish()


def _function_calls(parser: Parser, text: str) -> Steps[dict[str, object]]:
    """Return the object that answers /parse_function_call."""
    found = yield from merge_steps((yield from _parse(parser, text)))
    calls = []
    for index, call in enumerate(found.calls):
        calls.append({"tool_index": index, "name": call.name, "parameters": call.arguments})
        yield
    return {"normal_text": found.text, "calls": calls}


def _separated(parser: Parser, text: str, *, blocks: bool) -> Steps[dict[str, object]]:
    """Return the object that answers /separate_reasoning."""
    events = yield from _parse(parser, text)
    found = yield from merge_steps(events)
    answer: dict[str, object] = {"reasoning_text": found.reasoning, "text": found.text}
    if not blocks:
        return answer
    texts: dict[str, list[str]] = {"reasoning": [], "text": []}
    joined: list[dict[str, str]] = []
    kinds = ((_BLOCK_TYPES[type(each)], each.text) for each in events if isinstance(each, ReasoningDelta | TextDelta))
    for kind, group in groupby(kinds, key=itemgetter(0)):
        block = "".join(map(itemgetter(1), group))
        texts[kind].append(block)
        joined.append({"type": kind, "text": block})
        yield
    return {**answer, **{f"{kind}_blocks": each for kind, each in texts.items()}, "blocks": joined}
