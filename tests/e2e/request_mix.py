"""Random requests of every kind that generates text, and a common form of their answers."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WORDS = ["the", "dog", "table", "Friday", "\u00e9", "\U0001f642", "\u65e5\u672c", '{"name"', "\n", "call", "</think>"]
STOPS = ["e", "a", "ok", "\ufffd", "\U0001f642", "table", "</think>", "</tool_call>", "x" * 200]
ITEM = {
    "type": "object",
    "properties": {"day": {"type": "string", "maxLength": 9}, "guests": {"type": "integer"}},
    "required": ["day", "guests"],
    "additionalProperties": False,
}
TOOL = {"name": "book_table", "parameters": ITEM, "strict": True}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": ITEM, "strict": True}}},
    {"regex": r"[a-e]{3,8}(foo|bar)\d+!"},
    {"ebnf": 'root ::= "The " ("quick" | "brown") " fox" [0-9]+'},
]

Body = dict[str, Any]


class Mix:
    """Requests of one seed for one model, which may have several names."""

    def __init__(self, seed: int, models: list[str], vocabulary: int) -> None:
        self._random = random.Random(seed)
        self._models = models
        self._vocabulary = vocabulary
        self._openings = [self._text(30) for _ in range(3)]

    def requests(self, count: int) -> Iterator[tuple[str, Body]]:
        """Yield `count` requests, each with its path."""
        makers = {CHATS: self._chat, COMPLETIONS: self._completion, RESPONSES: self._response}
        for _ in range(count):
            [path] = self._random.choices(list(makers), [3, 2, 1])
            yield path, makers[path]()

    def _maybe(self, chance: float, **fields: Any) -> Body:
        return fields if self._random.random() < chance else {}

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))

    def _prompt(self) -> str:
        return self._random.choice([*self._openings, ""]) + self._text(self._random.randint(1, 20))

    def _ids(self, most: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(self._random.randint(1, most))]

    def _drawn(self) -> Body:
        """Return parameters of every endpoint."""
        pick = self._random
        return {
            "model": pick.choice(self._models),
            "temperature": pick.choice([0, 0.7, 1.3]),
            "seed": pick.randrange(1000),
            **self._maybe(0.3, top_p=0.8),
            **self._maybe(0.2, top_k=20),
            **self._maybe(0.3, min_tokens=pick.randint(0, 5)),
            **self._maybe(0.2, ignore_eos=True),
            **self._maybe(0.5, stop=pick.sample(STOPS, pick.randint(1, 3))),
        }

    def _sampled(self) -> Body:
        """Return parameters of chats and completions only."""
        pick = self._random
        return {
            **self._drawn(),
            "max_tokens": pick.choice([5, 20, 50]),
            **self._maybe(0.2, n=3),
            **self._maybe(0.2, presence_penalty=1.5),
            **self._maybe(0.2, frequency_penalty=-1.0),
            **self._maybe(0.2, repetition_penalty=1.3),
            **self._maybe(0.3, logit_bias={"0": pick.choice([3, 6, 100]), str(pick.randrange(self._vocabulary)): 4}),
            **self._maybe(0.3, stop_token_ids=self._ids(20)),
            **self._maybe(0.3, skip_special_tokens=False),
            **self._maybe(0.2, include_stop_str_in_output=True),
        }

    def _chat(self) -> Body:
        pick = self._random
        tools = {
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": pick.choice(["auto", "required", {"type": "function", "function": {"name": TOOL["name"]}}]),
        }
        return {
            **self._sampled(),
            "messages": [{"role": "system", "content": pick.choice(self._openings)}] * pick.randint(0, 1)
            + [{"role": "user", "content": self._prompt()}],
            **self._maybe(0.4, logprobs=True, top_logprobs=pick.randint(0, 3)),
            **self._maybe(0.3, prediction={"type": "content", "content": self._text(20)}),
            **self._maybe(0.2, thinking_token_budget=pick.choice([0, 3, 10])),
            **pick.choice([tools, pick.choice(FORMATS), {}, {}]),
        }

    def _completion(self) -> Body:
        pick = self._random
        return {
            **self._sampled(),
            "prompt": pick.choice([self._prompt(), self._ids(30), [self._prompt(), self._prompt()]]),
            **self._maybe(0.4, logprobs=pick.randint(0, 3)),
            **self._maybe(0.3, echo=True),
            **pick.choice([pick.choice(FORMATS), {}, {}, {}]),
        }

    def _response(self) -> Body:
        return {
            **self._drawn(),
            "input": self._prompt(),
            "store": False,
            "max_output_tokens": self._random.choice([5, 20, 50]),
            **self._maybe(0.4, tools=[{"type": "function", **TOOL}], tool_choice="required"),
        }


@dataclass
class ParsedChoice:
    """Choice of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[str] = field(default_factory=list)
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)

    def add(self, choice: Body) -> None:
        """Add a chunk of a chat or a completion, or the whole of either."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += message.get("content") or choice.get("text") or ""
        self.reasoning += message.get("reasoning_content") or ""
        for place, call in enumerate(message.get("tool_calls") or ()):
            if (index := call.get("index", place)) == len(self.calls):
                self.calls.append(call["function"]["name"])
            self.calls[index] += call["function"]["arguments"]
        self.finish = choice["finish_reason"] or self.finish
        scored = choice["logprobs"] or {}
        for entry in scored.get("content") or ():
            self.tokens.append(entry["token"])
            self.scores += [entry["logprob"], *(other["logprob"] for other in entry["top_logprobs"])]
        self.tokens += scored.get("tokens", ())
        self.scores += scored.get("token_logprobs", ())


def parse_answer(path: str, parts: list[Body]) -> tuple[dict[Any, ParsedChoice], Body]:
    """Return (choices, counts) of an answer, from its single part or from all chunks or events of a stream."""
    if path == RESPONSES:
        whole = parts[-1].get("response", parts[-1])
        texts = [json.dumps(item.get("content", item.get("arguments"))) for item in whole["output"]]
        return {0: ParsedChoice(calls=texts, finish=whole["status"])}, _counts(whole["usage"])
    choices: dict[Any, ParsedChoice] = {}
    for part in parts:
        for choice in part["choices"]:
            choices.setdefault(choice["index"], ParsedChoice()).add(choice)
    return dict(sorted(choices.items())), _counts(parts[-1]["usage"])


def _counts(usage: Body) -> Body:
    """Return the counts that do not depend on the cache."""
    cached = {"prompt_tokens_details", "input_tokens_details"}
    return {name: value for name, value in usage.items() if name not in cached}
