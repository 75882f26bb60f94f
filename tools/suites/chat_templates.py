"""Published chat templates, rendered by Tercet and by transformers: python -m tools.suites.chat_templates DIRECTORY.

DIRECTORY has templates as `*.jinja`. Prints a Markdown table of the counts, and with `--each` every text that differs.
Transformers gets messages in the form that its documentation asks for: arguments are objects, content is text. A text
may also equal the one that transformers renders of another form: arguments as text, no content, content as parts.
"""

import argparse
import difflib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tercet.frontend.chat.messages import history
from tercet.frontend.chat.tool_prompt import for_template, with_instructions
from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.prompts import ChatPrompt
from tercet.frontend.parsers.port import ToolSpec

Message = dict[str, Any]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


_TOOL = ToolSpec(
    "get_weather",
    {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}, "required": ["city"]},
    "Tell the weather",
)


class Outcome(StrEnum):
    """Comparison of two renderings. The words are the rows of the table."""

    EQUAL = "equal"
    OTHER_FORM = "equal to transformers' text of another form of the messages"
    REFUSED = "both refuse"
    RESHAPED = "transformers refuses, Tercet reshapes the messages"
    LOSES = "transformers leaves a text out, Tercet does not"
    DIFFERS = "differs"
    TERCET_REFUSES = "transformers renders, Tercet refuses"


@dataclass(frozen=True)
class Chat:
    """Conversation of the grid, as a client sends it."""

    name: str
    messages: list[Message]
    texts: tuple[str, ...]
    """Texts that a prompt must contain."""
    tools: bool = False
    add_generation_prompt: bool = True

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the texts that a prompt must contain, with the description of the tool."""
        return (*self.texts, _TOOL.description) if self.tools else self.texts


@dataclass(frozen=True)
class Finding:
    """Comparison of one chat in one template."""

    template: str
    chat: str
    outcome: Outcome
    detail: str = ""


def _call(number: int, city: str) -> Message:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city, "days": 3})}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def chats() -> list[Chat]:
    """Return the grid of conversations."""
    system, user = _said("system", "Be kind-A."), _said("user", "Hello-B")
    answer, more = _said("assistant", "Hi-C there"), _said("user", "More-D")
    called = _said("assistant", None, tool_calls=[_call(1, "Oslo-E")])
    result = _said("tool", "Rain-F", tool_call_id="call00001")
    parts = [{"type": "text", "text": "Hello-B"}, {"type": "text", "text": " World-G"}]
    both = _said("assistant", None, tool_calls=[_call(1, "Oslo-E"), _call(2, "Rome-H")])
    second = _said("tool", "Sun-I", tool_call_id="call00002")
    loop = _said("assistant", None, reasoning_content="Think-J", tool_calls=[_call(1, "Oslo-E")])
    spoken = {**loop, "content": "Look-K"}
    thought = _said("assistant", "Hi-C there", reasoning_content="Think-J")
    late = [user, answer, _said("system", "Late-L"), more]
    return [
        Chat("user", [user], ("Hello-B",)),
        Chat("system", [system, user], ("Be kind-A.", "Hello-B")),
        Chat("developer", [_said("developer", "Be kind-A."), user], ("Be kind-A.", "Hello-B")),
        Chat("turns", [user, answer, more], ("Hello-B", "Hi-C there", "More-D")),
        Chat("system and turns", [system, user, answer, more], ("Be kind-A.", "Hello-B", "Hi-C there", "More-D")),
        Chat("parts", [_said("user", parts)], ("Hello-B", " World-G")),
        Chat("two users", [user, more], ("Hello-B", "More-D")),
        Chat("late system", [system, *late], ("Be kind-A.", "Hello-B", "Late-L", "More-D")),
        Chat("answer last", [user, answer], ("Hello-B", "Hi-C there"), add_generation_prompt=False),
        Chat("tools", [user], ("Hello-B", "get_weather"), tools=True),
        Chat("tools and system", [system, user], ("Be kind-A.", "Hello-B", "get_weather"), tools=True),
        Chat("call", [user, called, result], ("Oslo-E", "Rain-F"), tools=True),
        Chat("call and answer", [user, called, result, answer, more], ("Oslo-E", "Rain-F", "More-D"), tools=True),
        Chat("two calls", [user, both, result, second], ("Oslo-E", "Rome-H", "Rain-F", "Sun-I"), tools=True),
        Chat("two rounds", [user, called, result, _again(called), _again(result)], ("Oslo-E", "Rain-F"), tools=True),
        Chat("result and user", [user, called, result, more], ("Oslo-E", "Rain-F", "More-D"), tools=True),
        Chat("answer first", [answer, user], ("Hi-C there", "Hello-B")),
        Chat("reasoning", [user, thought, more], ("Hi-C there", "More-D")),
        Chat("reasoning in a loop", [user, loop, result], ("Oslo-E", "Rain-F"), tools=True),
        Chat("reasoning and content in a loop", [user, spoken, result], ("Oslo-E", "Rain-F", "Look-K"), tools=True),
    ]


def _again(message: Message) -> Message:
    return json.loads(json.dumps(message).replace("call00001", "call00009"))  # type: ignore[no-any-return]


def compare(name: str, source: str) -> list[Finding]:
    """Compare the grid in one template."""
    template = TemplateManager(source, TOKENS)
    findings = [_compare(name, source, template, chat) for chat in chats()]
    # Some templates print the time: its second may have changed between two renderings.
    return [
        _compare(name, source, template, chat) if found.outcome is Outcome.DIFFERS else found
        for found, chat in zip(findings, chats(), strict=True)
    ]


def _compare(name: str, source: str, template: TemplateManager, chat: Chat) -> Finding:
    ours = _tercet(template, chat)
    first, *others = _forms(chat.messages)
    theirs = _transformers(source, first, chat)
    if ours is None:
        return Finding(name, chat.name, Outcome.REFUSED if theirs is None else Outcome.TERCET_REFUSES, theirs or "")
    if ours == theirs:
        return Finding(name, chat.name, Outcome.EQUAL)
    if any(ours == _transformers(source, form, chat) for form in others):
        return Finding(name, chat.name, Outcome.OTHER_FORM)
    if theirs is None:
        return Finding(name, chat.name, Outcome.RESHAPED, ours)
    detail = "\n".join(difflib.unified_diff(theirs.split("\n"), ours.split("\n"), "transformers", "tercet", n=1))
    return Finding(name, chat.name, _difference(chat, ours, theirs), detail)


def _difference(chat: Chat, ours: str, theirs: str) -> Outcome:
    """Return whether Tercet's text is better."""
    for texts in (chat.wanted, (*chat.wanted, "Think-J")):
        kept, theirs_kept = ({text for text in texts if text in each} for each in (ours, theirs))
        if theirs_kept < kept:
            return Outcome.LOSES
    return Outcome.DIFFERS


def _tercet(template: TemplateManager, chat: Chat) -> str | None:
    messages, tools = history(deepcopy(chat.messages)), for_template([_TOOL]) if chat.tools else None
    if tools and not template.supports_tools:
        messages = with_instructions(messages, [_TOOL], template.parsers.tools)
    prompt = ChatPrompt(messages=messages, tools=tools, add_generation_prompt=chat.add_generation_prompt)
    try:
        return template.render(prompt)
    except BadRequestError:
        return None


def _transformers(source: str, messages: list[Message], chat: Chat) -> str | None:
    try:
        [text], _ = render_jinja_template(
            [deepcopy(messages)],
            tools=for_template([_TOOL]) if chat.tools else None,
            chat_template=source,
            add_generation_prompt=chat.add_generation_prompt,
            **TOKENS,
        )
    except Exception:  # templates fail in as many ways as Python does
        return None
    return str(text)


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Generate the forms of messages that templates are written for, the documented one first."""
    for as_text, empty, as_parts, system in itertools.product((False, True), ("", None), (False, True), (False, True)):
        yield [_formed(each, as_text=as_text, empty=empty, as_parts=as_parts, system=system) for each in messages]
    if messages[0]["role"] in ("system", "developer"):
        first, second, *rest = messages
        yield [{**second, "content": f"{first['content']}\n\n{second['content']}"}, *rest]


def _formed(message: Message, *, as_text: bool, empty: str | None, as_parts: bool, system: bool) -> Message:
    """Convert a message to one form; results get their tool's name, which transformers' documentation asks for."""
    content = message["content"]
    if isinstance(content, list) and not as_parts:
        content = "".join(part["text"] for part in content)
    elif isinstance(content, list) and as_parts:
        content = [{"type": "text", "text": "".join(part["text"] for part in content)}]
    elif as_parts and content is not None:
        content = [{"type": "text", "text": content}]
    formed = {**message, "content": empty if content is None else content}
    if message["role"] == "developer" and system:
        formed["role"] = "system"
    if message["role"] == "tool":
        formed["name"] = "get_weather"
    if calls := message.get("tool_calls"):
        formed["tool_calls"] = [_formed_call(call, as_text=as_text) for call in calls]
    return formed


def _formed_call(call: Message, *, as_text: bool) -> Message:
    function = call["function"]
    arguments = function["arguments"] if as_text else json.loads(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def table(findings: list[Finding]) -> str:
    """Return the counts as a Markdown table, for texts and for templates."""
    texts = Counter(finding.outcome for finding in findings)
    templates = Counter(outcome for _, outcome in {(finding.template, finding.outcome) for finding in findings})
    rows = [f"| {outcome} | {texts[outcome]} | {templates[outcome]} |" for outcome in Outcome]
    return "\n".join(["| outcome | texts | templates with such a text |", "|---|---|---|", *rows])


def main() -> int:
    """Compare all templates of a directory; exit status 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description="Compare rendered chat templates with transformers'.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--each", action="store_true", help="print each text that differs")
    parser.add_argument("--only", default="", help="part of a template's or chat's name")
    options = parser.parse_args()
    findings: list[Finding] = []
    for path in sorted(options.directory.glob("*.jinja")):
        try:
            findings += compare(path.stem, path.read_text(encoding="utf-8"))
        except ValueError as error:
            print(f"{path.name}: {error}")
    shown = [each for each in findings if options.only in f"{each.template} {each.chat}"]
    for finding in shown if options.each else ():
        if finding.outcome not in (Outcome.EQUAL, Outcome.OTHER_FORM, Outcome.REFUSED):
            print(f"\n## {finding.template}: {finding.chat}: {finding.outcome}\n{finding.detail}")
    print(f"\n{len({each.template for each in shown})} templates, {len(shown)} texts\n\n{table(shown)}")
    return int(any(each.outcome in (Outcome.DIFFERS, Outcome.TERCET_REFUSES) for each in findings))


if __name__ == "__main__":
    sys.exit(main())
