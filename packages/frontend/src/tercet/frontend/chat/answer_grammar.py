"""Combined grammar of an answer: reasoning, then tool calls, a constrained text, or free text."""

import re
from collections.abc import Set as AbstractSet

import msgspec
import orjson

from tercet.frontend.chat.call_grammar import CallGrammar, with_any_values
from tercet.frontend.chat.rules import Rules, any_token_but, check_size, escaped, one_token_of
from tercet.frontend.constraints import Constraint, Tokens
from tercet.frontend.parsers.port import ReasoningFraming, ToolFraming, ToolSpec
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.frontend.structured_output.composition import Composition, GrammarPart
from tercet.frontend.structured_output.lark import LarkWriter, lark_string, regex_terminal
from tercet.protocol.messages.values import Grammar, GrammarKind, ThinkingBudget

_CONSTRAINT = "tercet"
"""Name that `LarkWriter` gives to a grammar that others refer to."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Constraint on the reasoning before an answer."""

    framing: ReasoningFraming
    opened: bool
    """The prompt has opened the reasoning; otherwise the answer may open it."""
    budget: int | None = None
    """Maximum tokens of reasoning."""


class EnforcedCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Constraint on the tool calls of an answer."""

    framing: ToolFraming
    tools: tuple[ToolSpec, ...]
    required: bool
    several: bool


def answer_grammar(
    tokens: Tokens, thinking: Thinking | None, calls: EnforcedCalls | None, constraint: Constraint | None
) -> Grammar:
    """Combine the constraints, of which at least one is given, into a grammar. Raises BadRequestError."""
    if thinking is None and calls is None and constraint is not None:
        return to_grammar(constraint, tokens)
    rules = Rules(tokens)
    budget = _counted_budget(tokens, thinking)
    if budget is not None and calls is None and constraint is None:
        return Grammar(GrammarKind.LARK, rules.text(f"{any_token_but(tokens.eos)}*"), budget)
    answer = _answer(rules, thinking.framing.answer if thinking else "", calls, constraint)
    text = rules.text(f"{_reasoning(rules, thinking)} {answer}" if thinking else answer)
    if constraint is not None:
        text = _beside(text, LarkWriter(tokens).grammar(constraint))
    check_size(len(text.encode()))
    return Grammar(GrammarKind.LARK, text, budget)


def _counted_budget(tokens: Tokens, thinking: Thinking | None) -> ThinkingBudget | None:
    """Return the budget that schedulers count, because the end marker is no token that a grammar can count up to."""
    if thinking is None or thinking.budget is None or thinking.framing.end in tokens.added:
        return None
    framing = thinking.framing
    return ThinkingBudget(thinking.budget, framing.end, "" if thinking.opened else framing.begin)


def composition(
    tokens: Tokens, thinking: Thinking | None, calls: EnforcedCalls | None, constraint: Constraint | None
) -> Composition | None:
    """Return the parts of the same answer's grammar, each tool and the constraint; None without enforced calls."""
    if calls is None:
        return None

    def alone(tool: ToolSpec) -> Grammar:
        single = msgspec.structs.replace(calls, tools=(tool,), required=True, several=False)
        return answer_grammar(tokens, None, single, None)

    def parts() -> list[GrammarPart]:
        found = [
            GrammarPart(grammar=alone(tool), param=tool.param, tool=tool.name, optional=not tool.strict)
            for tool in calls.tools
        ]
        if constraint is not None and not calls.required:
            found.append(GrammarPart(grammar=to_grammar(constraint, tokens), param=constraint.param))
        return found

    def without(names: AbstractSet[str]) -> Grammar:
        tools = tuple(with_any_values(tool) if tool.name in names else tool for tool in calls.tools)
        return answer_grammar(tokens, thinking, msgspec.structs.replace(calls, tools=tools), constraint)

    return Composition(parts=parts, without=without)


def _answer(rules: Rules, opening: str, calls: EnforcedCalls | None, constraint: Constraint | None) -> str:
    """Return the rule after the reasoning. `opening` is the notation's prefix of an answer without calls."""
    constrained = f"{rules.literal(opening)} @{_CONSTRAINT}"
    if calls is None:
        return constrained if constraint is not None else f"{rules.literal(opening)} {any_token_but(rules.tokens.eos)}*"
    grammar = CallGrammar(rules, calls.framing, calls.tools, several=calls.several)
    if calls.required:
        return grammar.answer()
    if constraint is not None:
        return rules.add(f"{constrained} | {grammar.answer()}")
    if opening:
        others = [rules.tokens.added[each] for each in calls.framing.extra_begins if each in rules.tokens.added]
        words = f"{rules.literal(opening)} {any_token_but([*others, *rules.tokens.eos])}*"
        return rules.add(f"{words} | {grammar.answer()}")
    return _text_with_calls(rules, grammar, calls)


def _text_with_calls(rules: Rules, grammar: CallGrammar, enforced: EnforcedCalls) -> str:
    """Return a rule for free text in which every trigger begins a valid call and no other call marker occurs."""
    added, several = rules.tokens.added, enforced.several
    triggers = grammar.triggers()
    signs = enforced.framing.extra_begins
    patterns = [*enforced.framing.extra_patterns, *(re.escape(sign) for sign in signs if sign not in added)]
    written = [regex_terminal(f"(?s:.*)({pattern})(?s:.*)") for pattern in patterns]
    text = rules.terminal(" & ".join(["/(?s:.*)/", *(f"~{each}" for each in written)]))
    before = rules.terminal(f"{text} & /((?s:.*)\\n)?/") if enforced.framing.line_start else text
    branches = []
    for trigger, calls in triggers.items():
        if trigger in added:
            branches.append(f"{text} {rules.literal(trigger)} {calls}")
        else:
            branches.append(f"{rules.add(f'{before} {lark_string(trigger)}', 'lazy')} {calls}")
    begins = {added.get(sign, -1) for sign in (*triggers, *signs)}
    others = set(added.values()) - begins - set(rules.tokens.eos)
    words = rules.add(f"({text} {one_token_of(others)})*") if others else ""
    part = rules.add(" | ".join(branches))
    if several:
        return rules.add(f"({words} {part})* {words} {text}")
    return rules.add(f"{words} {part} | {words} {text}")


def _reasoning(rules: Rules, thinking: Thinking) -> str:
    framing, added = thinking.framing, rules.tokens.added
    if framing.end not in added:
        thoughts = _text_until(rules, framing.end)
    elif thinking.budget == 0:
        thoughts = rules.literal(framing.end)
    else:
        most = "*" if thinking.budget is None else f"{{0,{thinking.budget}}}"
        thoughts = f"{any_token_but([added[framing.end], *rules.tokens.eos])}{most} {rules.literal(framing.end)}"
    behind = rules.literal(framing.turn) if framing.turn else r"/\n{0,2}/"
    if thinking.opened:
        return f"{thoughts} {behind}"
    return f"({rules.literal(framing.begin)} {thoughts} {behind})?"


def _text_until(rules: Rules, end: str) -> str:
    """Return the expression for text and added tokens up to a marker that is no token."""
    text = rules.terminal(f"/(?s:.)*/ & ~/(?s:.)*{escaped(end)}(?s:.)*/")
    last = rules.add(f"/(?s:.)*{escaped(end)}/", "lazy")
    others = set(rules.tokens.added.values()) - set(rules.tokens.eos)
    return f"({text} {one_token_of(others)})* {last}" if others else last


def _beside(text: str, constraint: str) -> str:
    """Bundle several grammars into one text."""
    if constraint.startswith("{"):
        others = orjson.loads(constraint)["grammars"]
    else:
        others = [{"name": _CONSTRAINT, "lark_grammar": constraint}]
    return orjson.dumps({"grammars": [{"name": "turn", "lark_grammar": text}, *others]}).decode()
