"""Planning of requests, and parsing by the notation of prompt and model."""

import json
from typing import Any

import pytest

from packages.frontend.tests.chat.vocabulary import ENDS, accepts, tokenizer, tokens
from tercet.frontend.chat.chat_request import Calls, ChatOptions, ToolChoice
from tercet.frontend.chat.custom_calls import custom_tool
from tercet.frontend.chat.output_parser import OutputParser, ParsedMessage, merge_events
from tercet.frontend.chat.planner import ChatPlan, ChatPlanner
from tercet.frontend.config.config import ServingConfig
from tercet.frontend.constraints import JsonObject
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.manager.req_state import ReqState, Update
from tercet.frontend.manager.request import GenerationOptions, ParamNames
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.parsers.registry import ParserNames
from tercet.frontend.routing.request_state import SingleWaiterEvent
from tercet.protocol.messages.values import FinishReason, FinishType, ModelIdentity, ModelLimits, SamplingParams

CHAT = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{{ tools }}"
THINKS = CHAT + "{# </think> #}"
STOP = FinishReason(FinishType.STOP, 0)


def model_of(template: str) -> ServedModel:
    files = {"tokenizer.json": tokenizer().to_str().encode(), "chat_template.jinja": template.encode()}
    size = tokenizer().get_vocab_size(with_added_tokens=True)
    limits = ModelLimits(
        model="tiny",
        context_length=4096,
        vocab_size=size,
        max_total_tokens=4096,
        eos_token_ids=[tokens().added[text] for text in ENDS],
        grammars="llguidance",
    )
    return ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))


def turn(**options: Any) -> ChatOptions:
    return ChatOptions(messages=[{"role": "user", "content": "x"}], **options)


async def planned(template: str, config: ServingConfig = ServingConfig(), **options: Any) -> tuple[ChatPlan, ReqState]:
    """Return the plan and a state of its request."""
    model = model_of(template)
    plan = await ChatPlanner(config).plan(turn(**options), model)
    request, sampling = plan.request, SamplingParams(max_new_tokens=0)
    return plan, ReqState("1", request, model, model.prompt_ids(request.prompt), sampling, SingleWaiterEvent())


def read(reader: OutputParser, text: str) -> ParsedMessage:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return merge_events(reader.read(Update(0, text, ids, [], STOP)))


async def test_a_prompt_that_opens_reasoning_is_known_to_reader_and_grammar() -> None:
    plan, state = await planned(THINKS + "<think>\n", constraint=JsonObject())
    assert plan.request.grammar is not None
    assert accepts(plan.request.grammar, "hm</think>{}")
    assert not accepts(plan.request.grammar, "{}")
    reader = plan.make_reader(state)
    assert read(reader, "hm\n</think>\n\nSo.") == ParsedMessage("So.", "hm", [])
    assert reader.reasoning_tokens == len(tokenizer().encode("hm\n</think>").ids)


async def test_a_prompt_that_closes_reasoning_leaves_none() -> None:
    plan, state = await planned(THINKS + "<think>\n\n</think>\n\n", constraint=JsonObject())
    assert plan.request.grammar is not None
    assert accepts(plan.request.grammar, "{}")
    assert not accepts(plan.request.grammar, "hm</think>{}")
    reader = plan.make_reader(state)
    assert read(reader, "So.") == ParsedMessage("So.", "", [])
    assert reader.reasoning_tokens == 0


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("name", "said", "arguments"),
    [
        ("run", 'print("hi")', 'print("hi")'),
        ("run", '{"patch": "x', '{"patch": "x'),
        ("now", "{\"zone\": 'x'}", "{\"zone\": 'x'}"),
        ("now", "", "{}"),
    ],
)
async def test_a_stop_token_that_ends_calls_ends_the_open_one(
    name: str, said: str, arguments: str, *, ended: bool
) -> None:
    """Text has no stop token in it. Any other end of the answer cuts the call off."""
    tools = (custom_tool("run", ""), ToolSpec("now"))
    plan, state = await planned(CHAT, ServingConfig(tool_call_parser="gpt_oss"), tools=tools)
    reader, stop = plan.make_reader(state), tokens().added["<|call|>" if ended else "<|return|>"]
    text = f"<|channel|>commentary to=functions.{name} code<|message|>{said}"
    told = merge_events(reader.read(Update(0, text, [], [], FinishReason(FinishType.STOP, stop))))
    [call] = told.calls
    assert (told.text, call.name, call.complete, reader.in_call) == ("", name, ended, not ended)
    assert call.arguments == (arguments if ended else said)


async def test_harmony_markers_are_decoded_and_hidden_without_tools() -> None:
    plan, state = await planned(CHAT + "{# <|channel|> #}")
    assert not plan.request.options.skip_special_tokens
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
    assert read(plan.make_reader(state), said) == ParsedMessage("So.", "hm", [])


async def test_special_tokens_stay_where_the_client_wants_them() -> None:
    plan, state = await planned(CHAT + "{# <|channel|> #}", options=GenerationOptions(skip_special_tokens=False))
    said = "<|channel|>final<|message|>So <|im_end|>."
    assert read(plan.make_reader(state), said).text == "So <|im_end|>."


async def test_text_alone_needs_no_reader() -> None:
    plan, _ = await planned(CHAT)
    assert not plan.reads
    assert plan.request.options.skip_special_tokens
    assert plan.request.grammar is None


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ServingConfig(), ParserNames("qwen3", "hermes")),
        (ServingConfig(tool_call_parser="glm"), ParserNames("qwen3", "glm")),
        (ServingConfig(reasoning_parser="none"), ParserNames(None, "hermes")),
        (ServingConfig(tool_call_parser="none", reasoning_parser="mistral"), ParserNames("mistral", None)),
    ],
)
def test_parsers_are_the_templates_unless_options_say_otherwise(config: ServingConfig, names: ParserNames) -> None:
    assert ChatPlanner(config).parsers(model_of(THINKS + "<tool_call>")) == names
    assert ChatPlanner().parsers(model_of(CHAT)) == ParserNames(None, "generic")


F = ToolSpec("f", {"type": "object", "properties": {"a": {"type": "integer"}}})
G = ToolSpec("g")


async def test_required_calls_are_a_grammar_of_the_tools_that_may_be_called() -> None:
    choice = ToolChoice(Calls.REQUIRED, frozenset({"g"}))
    plan, _ = await planned(CHAT + "{# <tool_call> #}", tools=(F, G), tool_choice=choice)
    assert plan.request.grammar is not None
    assert accepts(plan.request.grammar, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>')
    assert not accepts(plan.request.grammar, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"constraint": JsonObject(), "tools": (F,)}, "response_format"),
        ({"constraint": JsonObject(), "tools": (F,), "tool_choice": ToolChoice(Calls.REQUIRED)}, "tools"),
        ({"thinking_budget": 3}, "thinking_token_budget"),
    ],
)
async def test_a_grammar_that_is_refused_names_who_asked_for_it(options: dict[str, Any], param: str) -> None:
    plan, _ = await planned(THINKS, **options)
    assert plan.request.grammar is not None
    assert plan.request.options.param_names.grammar == param


async def test_calls_of_tools_that_are_not_allowed_stay_text() -> None:
    choice = ToolChoice(Calls.AUTO, frozenset({"g"}))
    plan, state = await planned(CHAT, tools=(F, G), tool_choice=choice)
    call = [{"name": "f", "arguments": {}}]
    assert read(plan.make_reader(state), json.dumps(call)).calls == []
    call[0]["name"] = "g"
    assert [each.name for each in read(plan.make_reader(state), json.dumps(call)).calls] == ["g"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": (F, F)}, "tools"),
        ({"tools": (F,), "tool_choice": ToolChoice(Calls.AUTO, frozenset({"g"}))}, "tool_choice"),
        ({"tool_choice": ToolChoice(Calls.REQUIRED)}, "tool_choice"),
        (
            {
                "thinking_budget": 5,
                "options": GenerationOptions(param_names=ParamNames(thinking_budget="thinking.budget_tokens")),
            },
            "thinking.budget_tokens",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
async def test_what_a_model_cannot_do_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as error:
        await planned(CHAT, **options)
    assert error.value.param == param


async def test_no_calls_are_promised_that_nobody_reads() -> None:
    with pytest.raises(UnsupportedParameterError) as error:
        await planned(CHAT, ServingConfig(tool_call_parser="none"), tools=(F,))
    assert error.value.param == "tools"
    plan, _ = await planned(
        CHAT, ServingConfig(tool_call_parser="none"), tools=(F,), tool_choice=ToolChoice(Calls.NONE)
    )
    assert not plan.reads
