"""Constraints on answers that are short to write and costly to follow: ambiguous grammars, large schemas, many tags."""

from collections.abc import Awaitable, Callable
from typing import Any

from tools.attacks.attack import Attack
from tools.attacks.http import again, at_once, model_of, post

_LARK = "start: s\ns: s s | s s s | A\nA: /[a-z ]/"
_GBNF = "root ::= s\ns ::= s s | s s s | [a-z ]"
_NULLABLE = "start: s\ns: a s a s a | \na: A?\nA: /[a-z ]/"
_LATER = 'start: "x"{40} s\ns: s s | s s s | A\nA: /[a-z ]/'
"""Becomes ambiguous after some tokens, which a trial of few tokens does not reach."""
_FORCED = 'start: ("a" "' + "lorem ipsum dolor " * 5000 + '")+'
_COUNTED = "(([a-z ]{1,90}[aeiou]){1,90}[.,]){1,90}"
_LOOKBACK = "(.*a.{14})+"
_STRING = {"type": "string"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _recursive(count: int) -> dict[str, Any]:
    def node(index: int) -> dict[str, Any]:
        refs = [{"$ref": f"#/$defs/n{(index * step + 1) % count}"} for step in (1, 7, 13)]
        return {"anyOf": [*refs, {"type": "array", "items": refs[0]}, _STRING]}

    return {"$defs": {f"n{index}": node(index) for index in range(count)}, "$ref": "#/$defs/n0"}


_SCHEMAS: dict[str, dict[str, Any]] = {
    "anyOf of 400 arrays": {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "pattern": f"^a{index}[a-z]*$"}} for index in range(400)
            ]
        },
        "minItems": 50,
    },
    "enum of 4,000": {"type": "array", "items": {"enum": [f"value {7919 * i}" for i in range(4000)]}, "minItems": 50},
    "$ref recursion": {"type": "array", "items": _recursive(60), "minItems": 50},
    "patternProperties": {
        "type": "object",
        "patternProperties": {f"^(p{index}|[a-z]{{1,{index + 1}}})_[a-z]*$": _STRING for index in range(60)},
        "additionalProperties": False,
        "minProperties": 50,
    },
    "300 optional fields": {"type": "object", "properties": {f"field_{index}": _STRING for index in range(300)}},
}


def _chats(many: int = 4, n: int = 1, **constraint: Any) -> Callable[[str, str], Awaitable[None]]:
    """Return an attack of chats with a constraint, `many` at a time, one after another."""

    async def run(url: str, key: str) -> None:
        body: dict[str, Any] = {
            "model": await model_of(url, key),
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": 200,
            "temperature": 1,
            "n": n,
            **constraint,
        }
        await at_once(again(lambda: post(url, key, "/v1/chat/completions", body)) for _ in range(many))

    return run


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _tags(count: int) -> dict[str, Any]:
    names = [f"<call_{index}" for index in range(count)]
    structures = [{"begin": f"{name}>", "schema": _object(value=_STRING), "end": "</call>"} for name in names]
    return {"response_format": {"type": "structural_tag", "structures": structures, "triggers": names}}


async def _ever_new(url: str, key: str) -> None:
    """Send different ambiguous grammars, so that each is checked and compiled again."""
    body = {"model": await model_of(url, key), "messages": [{"role": "user", "content": "go on"}], "max_tokens": 200}
    sent = 0

    async def one() -> None:
        nonlocal sent
        sent += 1
        grammar = f'start: "x"{{{sent % 60 + 1}}} "{sent}" s\ns: s s | s s s | A\nA: /[a-z ]/'
        await post(url, key, "/v1/chat/completions", {**body, "guided_grammar": grammar})

    await at_once(again(one) for _ in range(8))


async def _native_bias(url: str, key: str) -> None:
    """Ask for choices whose tokens need much sampling work."""
    bias = {str(token): -1.0 for token in range(300)}
    sampling = {"n": 16, "max_tokens": 200, "logit_bias": bias, "repetition_penalty": 1.1, "temperature": 1}
    body = {"model": await model_of(url, key), "prompt": "Once upon", **sampling}
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(2))


async def _stops(url: str, key: str) -> None:
    """Send long stop strings that begin like the likely output."""
    stop = [("a " * 500)[index:] + str(index) for index in range(4)]
    body = {"model": await model_of(url, key), "prompt": "a " * 20, "max_tokens": 200, "stop": stop, "n": 16}
    await at_once(again(lambda: post(url, key, "/v1/completions", body)) for _ in range(4))


ATTACKS = (
    Attack("no constraint, n = 16 (for comparison)", _chats(1, 16)),
    Attack("ambiguous grammar in Lark, 4 at a time", _chats(guided_grammar=_LARK)),
    Attack("ambiguous grammar in Lark, n = 16", _chats(1, 16, guided_grammar=_LARK)),
    Attack("ambiguous grammar in GBNF, 4 at a time", _chats(guided_grammar=_GBNF)),
    Attack("grammar with nullable rules, n = 16", _chats(1, 16, guided_grammar=_NULLABLE)),
    Attack("grammar that becomes ambiguous later, n = 16", _chats(1, 16, guided_grammar=_LATER)),
    Attack("ambiguous grammars, each new", _ever_new),
    Attack("grammar that forces 90,000 characters, n = 16", _chats(1, 16, guided_grammar=_FORCED)),
    Attack("regex with nested counts, n = 16", _chats(1, 16, guided_regex=_COUNTED)),
    Attack("regex that looks back, n = 16", _chats(1, 16, guided_regex=_LOOKBACK)),
    *(Attack(f"schema: {name}, n = 8", _chats(2, 8, **_schema(schema))) for name, schema in _SCHEMAS.items()),
    Attack("structural tag with 400 triggers, n = 8", _chats(2, 8, **_tags(400))),
    Attack("logit_bias of 300 tokens and penalties, n = 16", _native_bias),
    Attack("long stop strings, n = 16", _stops),
)
