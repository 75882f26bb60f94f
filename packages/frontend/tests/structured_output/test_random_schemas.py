"""Random walks under the grammars of random schemas end in instances, by an independent validator."""

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.json_schema import check_schema, schema_text

BYTES = LLTokenizer("byte")
SIZE = 256
MOST = 400
NUMBERS = [0, 1, 5, 10, -1, -5, 0.5, -0.5, 5.5, -5.5, 4.99, 100, 1e-7, 1e3, -0.0, 12.25]
NAMES = ["a", "b", "c d", 'q"']
PATTERNS = ["^[a-c]+$", "x", "^.{2}$", r"^\d{1,3}$", "^[^[]$", "(ab|c)$"]
FORMATS = ["date", "date-time", "ipv4", "uuid", "int64", "color"]


class Maker:
    """Maker of random schemas with keywords of all kinds."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def schema(self, depth: int = 2) -> Any:
        makers = [self.number, self.number, self.number, self.string, self.constant]
        if depth:
            makers += [lambda: self.object(depth - 1), lambda: self.array(depth - 1), lambda: self.choice(depth - 1)]
        return {**self._chance.choice(makers)(), **self.annotation()}

    def number(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": self._chance.choice(["number", "integer", ["integer", "null"]])}
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self._chance.random() < 0.4:
                schema[keyword] = self._chance.choice(NUMBERS)
        if self._chance.random() < 0.2:
            schema["multipleOf"] = self._chance.choice([1, 2, 0.5, 0.25, 3])
        return schema

    def string(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        extra = self._chance.randrange(4)
        if extra == 0:
            schema["pattern"] = self._chance.choice(PATTERNS)
        elif extra == 1:
            schema["format"] = self._chance.choice(FORMATS)
        else:
            schema |= {"minLength": self._chance.choice([0, 1.0, 2]), "maxLength": self._chance.choice([2, 3, 10])}
        return schema

    def constant(self) -> dict[str, Any]:
        values = [None, True, "a", 'q"\n', 0, -1.5, 2**60, [1, "x"], {"a": 1e-7}]
        if self._chance.random() < 0.5:
            return {"const": self._chance.choice(values)}
        return {"enum": self._chance.sample(values, 3), **self._chance.choice([{}, {"type": ["number", "string"]}])}

    def object(self, depth: int) -> dict[str, Any]:
        names = self._chance.sample(NAMES, self._chance.randint(0, 3))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema(depth) for name in names},
            "required": self._chance.sample(NAMES, self._chance.randint(0, 2)),
        }
        match self._chance.randrange(4):
            case 0:
                schema["additionalProperties"] = False
            case 1:
                schema["additionalProperties"] = self.schema(0)
            case 2:
                schema["patternProperties"] = {"^x[0-9]$": self.schema(0)}
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.schema(depth), "maxItems": 3.0}
        if self._chance.random() < 0.5:
            schema["minItems"] = self._chance.randint(0, 2)
        if self._chance.random() < 0.3:
            schema["prefixItems"] = [self.schema(0)]
        return schema

    def choice(self, depth: int) -> dict[str, Any]:
        kind = self._chance.choice(["anyOf", "allOf", "$ref", "oneOf"])
        if kind == "$ref":
            return {"$ref": "#/definitions/x y"} if self._chance.random() < 0.5 else {"anyOf": [{"$ref": "#tail"}]}
        if kind == "allOf":
            return {"allOf": [self.number(), self.number()]}
        return {kind: [self.schema(depth), self.schema(depth)]}

    def annotation(self) -> dict[str, Any]:
        return self._chance.choice([{}, {}, {"nullable": True}, {"title": "t", "order": 1}, {"default": 7}])

    def root(self) -> dict[str, Any]:
        named = {"x y": self.number(), "tail": {"$anchor": "tail", **self.string()}}
        return {**self.schema(), "definitions": named, "$defs": {"tail": named["tail"]}}


def walk(matcher: LLMatcher, chance: random.Random) -> str | None:
    """Return one text: random bytes that are allowed, closing brackets and quotes first; None if it is too long."""
    said = bytearray()
    for _ in range(MOST):
        mask = matcher.compute_bitmask()
        if matcher.is_stopped():
            break
        allowed = [byte for byte in range(SIZE) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_accepting() and (not allowed or chance.random() < 0.5):
            break
        closing = [byte for byte in allowed if byte in b'"}]'] if chance.random() < 0.5 else []
        plain = [byte for byte in allowed if byte in b"0123456789.eE-abc"] if chance.random() < 0.7 else []
        said.append(chance.choice(closing or plain or allowed))
        assert matcher.consume_token(said[-1])
    return said.decode() if matcher.is_accepting() else None


@pytest.mark.parametrize("seed", range(8))
def test_every_complete_walk_is_an_instance(seed: int) -> None:
    chance = random.Random(seed)
    maker, complete = Maker(chance), 0
    for _ in range(40):
        schema = maker.root()
        try:
            check_schema(schema, "schema", strict=False)
            text = schema_text(schema, "schema")
        except BadRequestError:
            continue
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(text), log_level=0)
        if matcher.is_error():
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for _ in range(4):
            if (said := walk(matcher.deep_copy(), chance)) is not None:
                assert validator.is_valid(json.loads(said)), (said, json.dumps(schema), text)
                complete += 1
    assert complete > 40


@pytest.mark.parametrize(
    "name", ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
@pytest.mark.parametrize("beside", [{}, {"pattern": "^[^;]+$", "allOf": [{"minLength": 2}]}])
def test_every_string_of_a_format_is_of_that_format(name: str, beside: dict[str, Any]) -> None:
    chance, complete = random.Random(1), 0
    schema = {"type": "string", "format": name, **beside}
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(schema_text(schema, "schema")), log_level=0)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    for _ in range(30):
        if (said := walk(matcher.deep_copy(), chance)) is not None:
            assert validator.is_valid(json.loads(said)), said
            complete += 1
    assert complete > 5
