"""Request schemas of structured output: OpenAI's `response_format`, and the fields of vLLM and SGLang."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, model_validator

from tercet.frontend.api.openai.sampling_schema import Name, Strict
from tercet.frontend.api.openai.structural_tag_schema import StructuralTagFormat, parse_structural_tag, structural_tag
from tercet.frontend.constraints import Choice, Constraint, Ebnf, JsonObject, JsonSchema, Regex
from tercet.frontend.errors import BadRequestError, FieldError
from tercet.frontend.json_number import parse_json
from tercet.frontend.structured_output.limits import MAX_OPTIONS, MAX_TEXT

Pattern = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
SchemaOrText = dict[str, Any] | Pattern
Options = Annotated[list[Annotated[str, Field(max_length=MAX_TEXT)]], Field(min_length=1, max_length=MAX_OPTIONS)]


class TextFormat(Strict):
    """Text without a constraint."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """JSON object, or an instance of a schema. Hugging Face's client names the schema `value`."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    value: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "JsonObjectFormat":
        if self.schema_ is not None and self.value is not None:
            raise FieldError("'schema' and 'value' exclude each other.", "value")
        return self


class NamedSchema(Strict):
    """JSON schema with a name and a description."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """Instance of a JSON schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(Strict):
    """vLLM's constraints. Exactly one must be set."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: Pattern | None = None


class StructuredFields(Strict):
    """Fields that constrain a response. At most one may be set.

    `guided_...` are vLLM's older names, `regex` and `ebnf` SGLang's. The scheduler's options choose the backend.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Options | None = None
    guided_grammar: Pattern | None = None
    guided_decoding_backend: Name | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None


class NativeStructuredFields(Strict):
    """SGLang's sampling parameters for structured output. Schemas and tags are JSON in a string."""

    json_schema: Pattern | None = None
    regex: Pattern | None = None
    ebnf: Pattern | None = None
    structural_tag: Pattern | None = None


def constraint_of(body: StructuredFields) -> Constraint | None:
    """Return the constraint of a request. Raises BadRequestError for more than one."""
    constraints = [format_constraint(body.response_format, "response_format")]
    if (outputs := body.structured_outputs) is not None:
        constraints += [
            _schema(outputs.json_, "structured_outputs.json"),
            _regex(outputs.regex, "structured_outputs.regex"),
            _choice(outputs.choice, "structured_outputs.choice"),
            _grammar(outputs.grammar, "structured_outputs.grammar"),
            JsonObject(param="structured_outputs.json_object") if outputs.json_object else None,
            parse_structural_tag(outputs.structural_tag, "structured_outputs.structural_tag"),
        ]
    constraints += [
        _schema(body.guided_json, "guided_json"),
        _regex(body.guided_regex, "guided_regex"),
        _choice(body.guided_choice, "guided_choice"),
        _grammar(body.guided_grammar, "guided_grammar"),
        _regex(body.regex, "regex"),
        _grammar(body.ebnf, "ebnf"),
    ]
    return _at_most_one(constraints)


def native_constraint_of(body: NativeStructuredFields, param: str = "sampling_params") -> Constraint | None:
    """Return the constraint of SGLang's sampling parameters. Raises BadRequestError for more than one."""
    return _at_most_one(
        [
            _schema(body.json_schema, f"{param}.json_schema"),
            _regex(body.regex, f"{param}.regex"),
            _grammar(body.ebnf, f"{param}.ebnf"),
            parse_structural_tag(body.structural_tag, f"{param}.structural_tag"),
        ]
    )


def format_constraint(response_format: ResponseFormat | None, param: str) -> Constraint | None:
    """Return the constraint of a `response_format`."""
    match response_format:
        case JsonObjectFormat(schema_=schema, value=value):
            given = _schema(value, f"{param}.value") if schema is None else _schema(schema, f"{param}.schema")
            return given or JsonObject(param=param)
        case JsonSchemaFormat(json_schema=named):
            return JsonSchema(
                schema=True if named.schema_ is None else named.schema_,
                strict=bool(named.strict),
                name=named.name,
                param=f"{param}.json_schema.schema",
            )
        case StructuralTagFormat():
            return structural_tag(response_format, param)
    return None


def parse_schema(text: str, param: str) -> dict[str, Any] | bool:
    """Return a schema that is JSON in a string. Raises BadRequestError."""
    try:
        schema = parse_json(text)
    except orjson.JSONDecodeError:
        raise BadRequestError("The schema is not standard JSON.", param=param) from None
    if not isinstance(schema, dict | bool):
        raise BadRequestError("A schema is an object or a boolean.", param=param)
    return schema


def _at_most_one(constraints: list[Constraint | None]) -> Constraint | None:
    given = [each for each in constraints if each is not None]
    if len(given) > 1:
        raise BadRequestError(
            f"'{given[1].param}' cannot be combined with '{given[0].param}': only one of them can constrain an answer.",
            param=given[1].param,
        )
    return given[0] if given else None


def _schema(schema: dict[str, Any] | str | None, param: str) -> JsonSchema | None:
    if schema is None:
        return None
    return JsonSchema(schema=parse_schema(schema, param) if isinstance(schema, str) else schema, param=param)


def _regex(pattern: str | None, param: str) -> Regex | None:
    return None if pattern is None else Regex(pattern=pattern, param=param)


def _choice(options: list[str] | None, param: str) -> Choice | None:
    return None if options is None else Choice(options=options, param=param)


def _grammar(text: str | None, param: str) -> Ebnf | None:
    return None if text is None else Ebnf(text=text, param=param)
