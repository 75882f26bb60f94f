"""Kinds of conversation in the corpus: questions, chats of several turns, tool calls, JSON, plain text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.demo_model.facts import TOPICS, Fact, read_facts, table
from tools.demo_model.keywords import Keywords
from tools.demo_model.phrasing import Phraser

Message = dict[str, Any]


@dataclass
class Conversation:
    """Messages for the chat template, with the tools offered; or plain text alone."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str = ""

    def user_texts(self) -> list[str]:
        """Return the user's messages, turn by turn."""
        return [m["content"] for m in self.messages if m["role"] == "user"]


class Writer:
    """Writer of conversations, one at a time, from one random generator."""

    def __init__(self, rng: Random) -> None:
        """Read all data files."""
        self.rng = rng
        self.phraser = Phraser(rng)
        self.facts = [fact for topic in TOPICS for fact in read_facts(topic)]
        self.by_id = {fact.id: fact for fact in self.facts}
        self.weights = [(len(f.asks) + len(f.names) + len(f.tasks) + len(f.cases)) ** 0.5 for f in self.facts]
        self.named = [fact for fact in self.facts if fact.names]
        self.keywords = Keywords(rng, self.facts, self.phraser.stop)
        self.small_talk = read_facts("smalltalk")
        self.exchanges = table("exchanges")
        off_topic = table("offtopic")
        self.fill: dict[str, list[str]] = off_topic["fill"]
        self.unknown = Fact("unknown", tuple(off_topic["answers"]), asks=tuple(off_topic["asks"]))
        self.kinds: list[tuple[float, Callable[[], Conversation]]] = [
            (59, self.single),
            (16, self.chat),
            (5, self.chain),
            (10, self.off_topic),
            (4, self.small),
            (4, self.tool_call),
            (1.5, self.json_answer),
            (1.5, self.extract),
            (2, self.plain),
            (0.3, self.long_chat),
        ]

    def write(self) -> Conversation:
        """Return a conversation of a random kind."""
        kind = self.rng.choices([k for _, k in self.kinds], [w for w, _ in self.kinds])[0]
        return kind()

    def single(self) -> Conversation:
        """Return a question about a fact."""
        return Conversation([*self._system(), *self._turn(self._fact())])

    def small(self) -> Conversation:
        """Return a turn of small talk."""
        return Conversation([*self._system(), *self._turn(self.rng.choice(self.small_talk))])

    def off_topic(self) -> Conversation:
        """Return a question that the model cannot answer."""
        return Conversation([*self._system(), *self._unknown_turn()])

    def chat(self, turns: int | None = None) -> Conversation:
        """Return several turns: facts, follow-ups, small talk, repetitions."""
        messages = self._system()
        for _ in range(turns or self.rng.randint(2, 4)):
            draw = self.rng.random()
            if draw < 0.45:
                messages += self._turn(self._fact())
            elif draw < 0.7:
                messages += self._named_follow_up()
            elif draw < 0.8:
                messages += self._unknown_turn()
            elif draw < 0.87 and messages and messages[-1]["role"] == "assistant":
                again = self.phraser.punctuated(self.phraser.expand(self.rng.choice(self.exchanges["repeat"])))
                messages += _pair(again, messages[-1]["content"])
            else:
                messages += self._turn(self.rng.choice(self.small_talk))
        return Conversation(messages)

    def long_chat(self) -> Conversation:
        """Return a chat long enough to train far positions."""
        return self.chat(self.rng.randint(8, 14))

    def chain(self) -> Conversation:
        """Return a question and a short follow-up that depends on it."""
        link = self.rng.choice(self.exchanges["chain"])
        messages = [*self._system(), *self._turn(self.by_id[link["first"]])]
        while link:
            text = self.phraser.punctuated(self.phraser.expand(self.rng.choice(link["asks"])))
            messages += _pair(text, self.rng.choice(self.by_id[link["then"]].answers))
            further = [c for c in self.exchanges["chain"] if c["first"] == link["then"]]
            link = self.rng.choice(further) if further and self.rng.random() < 0.3 and len(messages) < 8 else None
        return Conversation(messages)

    def plain(self) -> Conversation:
        """Return facts in a row as plain text, for completions without a chat template."""
        return Conversation(text=" ".join(self.rng.choice(self._fact().answers) for _ in range(self.rng.randint(2, 5))))

    def json_answer(self) -> Conversation:
        """Return a request for a fact as a JSON object."""
        fact = self._fact()
        question = self._question(fact)
        reply = json.dumps({"answer": self.rng.choice(fact.answers)})
        if self.rng.random() < 0.5:
            system = {"role": "system", "content": self.rng.choice(self.exchanges["json"]["systems"])}
            return Conversation([system, *_pair(question, reply)])
        return Conversation(_pair(f"{question} {self.rng.choice(self.exchanges['json']['suffixes'])}", reply))

    def extract(self) -> Conversation:
        """Return a request for the fields of a sentence as a JSON object."""
        kind = self.rng.choice(self.exchanges["extract"])
        values: dict[str, str | int] = {
            "name": self.rng.choice(self.exchanges["json"]["name"]),
            "age": self.rng.randint(1, 99),
            "city": self.rng.choice(self.fill["city"]),
            "country": self.rng.choice(self.fill["country"]),
        }
        text = self.phraser.expand(self.rng.choice(kind["asks"]))
        for key, value in values.items():
            text = text.replace("%" + key, str(value))
        return Conversation([*self._system(), *_pair(text, json.dumps({k: values[k] for k in kind["fields"]}))])

    def tool_call(self) -> Conversation:
        """Return a tool call with its result, or a question that needs none of the offered tools."""
        offered = self.rng.sample(self.exchanges["tool"], self.rng.choices([1, 2, 3], [6, 3, 1])[0])
        chosen, names = offered[0], [self.rng.choice(tool["names"]) for tool in offered]
        arguments = [self.rng.choice(tool["argument"]) for tool in offered]
        tools = [self._tool(*parts) for parts in zip(offered, names, arguments, strict=True)]
        order = self.rng.sample(range(len(tools)), len(tools))
        system, tools = self._system(), [tools[i] for i in order]
        if self.rng.random() < 0.25:
            turn = self._turn(self._fact()) if self.rng.random() < 0.6 else self._turn(self.rng.choice(self.small_talk))
            return Conversation([*system, *turn], tools)
        pool = self.exchanges["json"]["part"] if chosen["values"] == "part" else self.fill[chosen["values"]]
        value = self.rng.choice(pool)
        ask = self.phraser.expand(self.rng.choice(chosen["asks"])).replace("%", value)
        call = {"function": {"name": names[0], "arguments": {arguments[0]: value}}}
        user = {"role": "user", "content": self.phraser.punctuated(ask)}
        result, said = self.rng.choice(chosen["results"])
        said = said.replace("%", value)
        messages = [
            *system,
            user,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": self.rng.choice([result, json.dumps({"result": result})])},
            {"role": "assistant", "content": said[:1].upper() + said[1:]},
        ]
        return Conversation(messages, tools)

    def _tool(self, kind: dict[str, Any], name: str, argument: str) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "properties": {argument: {"type": "string"}}}
        if self.rng.random() < 0.5:
            schema["required"] = [argument]
        function = {"name": name, "description": self.rng.choice(kind["describe"]), "parameters": schema}
        return {"type": "function", "function": function}

    def _fact(self) -> Fact:
        return self.rng.choices(self.facts, self.weights)[0]

    def _system(self) -> list[Message]:
        if self.rng.random() > 0.35:
            return []
        text = self.phraser.expand(self.rng.choice(self.phraser.frames["systems"]))
        return [{"role": "system", "content": text}]

    def _turn(self, fact: Fact) -> list[Message]:
        return _pair(self._question(fact), self.rng.choice(fact.answers))

    def _question(self, fact: Fact) -> str:
        if fact.id in self.by_id and self.rng.random() < 0.12:
            return self.phraser.punctuated(self.keywords.question(fact))
        return self.phraser.noisy(self.phraser.bare(fact))

    def _named_follow_up(self) -> list[Message]:
        fact = self.rng.choice(self.named)
        return _pair(self.phraser.follow_up(self.rng.choice(fact.names)), self.rng.choice(fact.answers))

    def _unknown_turn(self) -> list[Message]:
        text = self.phraser.bare(self.unknown)
        for key, words in self.fill.items():
            while f"%{key}" in text:
                text = text.replace(f"%{key}", self.rng.choice(words), 1)
        return _pair(self.phraser.noisy(text), self.rng.choice(self.unknown.answers))


def _pair(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
