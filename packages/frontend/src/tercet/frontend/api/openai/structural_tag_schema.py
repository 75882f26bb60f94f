"""Schema of `structural_tag`: free text with constrained parts.

Both forms are accepted, the older one of SGLang and vLLM and the newer one with `format`.
"""

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationError, model_validator

from tercet.frontend.api.openai.sampling_schema import Strict
from tercet.frontend.constraints import Choice, Constraint, Ebnf, JsonSchema, Regex, StructuralTag, Tag
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.parameter_path import joined, keys_of
from tercet.frontend.json_number import parse_json
from tercet.frontend.structured_output.limits import MAX_TAGS, MAX_TEXT

Text = Annotated[str, Field(max_length=MAX_TEXT)]
Triggers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=MAX_TAGS)
]


class Structure(Strict):
    """Tag: the text of `begin`, an instance of the schema, the text of `end`."""

    begin: Text
    schema_: dict[str, Any] = Field(alias="schema")
    end: Text


class SchemaContent(Strict):
    """Instance of a JSON schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool


class RegexContent(Strict):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    pattern: Text


class GrammarContent(Strict):
    """Text that matches a grammar."""

    type: Literal["grammar"]
    grammar: Text


class ConstantContent(Strict):
    """Fixed text."""

    type: Literal["const_string"]
    value: Text


Content = Annotated[SchemaContent | RegexContent | GrammarContent | ConstantContent, Field(discriminator="type")]


class TagFormat(Strict):
    """Tag: the text of `begin`, the content, the text of `end`. As the `format` it is the whole answer."""

    type: Literal["tag"] = "tag"
    begin: Text
    content: Content
    end: Text


Tags = Annotated[list[TagFormat], Field(min_length=1, max_length=MAX_TAGS)]


class TriggeredTags(Strict):
    """Free text in which a trigger begins a tag."""

    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False


class SeparatedTags(Strict):
    """Sequence of tags without free text."""

    type: Literal["tags_with_separator"]
    tags: Tags
    separator: Text
    at_least_one: bool = False
    stop_after_first: bool = False


TagsFormat = Annotated[TagFormat | TriggeredTags | SeparatedTags, Field(discriminator="type")]


class StructuralTagFormat(Strict):
    """Structural tag: either `structures` and `triggers`, or `format`."""

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MAX_TAGS)] | None = None
    triggers: Triggers | None = None
    format: TagsFormat | None = None

    @model_validator(mode="after")
    def _check_form(self) -> "StructuralTagFormat":
        older = self.structures is not None and self.triggers is not None
        if older == (self.format is not None) or (self.structures is None) != (self.triggers is None):
            raise ValueError("a structural tag has either 'structures' and 'triggers', or 'format'")
        return self


def structural_tag(tag_format: StructuralTagFormat, param: str) -> StructuralTag:
    """Return the constraint of a structural tag."""
    match tag_format.format:
        case TriggeredTags() as form:
            return StructuralTag(
                tags=[_tag(each, param) for each in form.tags],
                triggers=form.triggers,
                at_least_one=form.at_least_one,
                only_one=form.stop_after_first,
                param=param,
            )
        case SeparatedTags() as form:
            return StructuralTag(
                tags=[_tag(each, param) for each in form.tags],
                triggers=[],
                at_least_one=form.at_least_one,
                only_one=form.stop_after_first,
                free=False,
                separator=form.separator,
                param=param,
            )
        case TagFormat() as form:
            return StructuralTag(
                tags=[_tag(form, param)], triggers=[], at_least_one=True, only_one=True, free=False, param=param
            )
    tags = [
        Tag(begin=each.begin, content=JsonSchema(schema=each.schema_, param=param), end=each.end)
        for each in tag_format.structures or []
    ]
    return StructuralTag(tags=tags, triggers=tag_format.triggers or [], param=param)


def parse_structural_tag(text: str | None, param: str) -> StructuralTag | None:
    """Return the constraint of a structural tag that is JSON in a string. Raises BadRequestError."""
    if text is None:
        return None
    try:
        return structural_tag(StructuralTagFormat.model_validate(parse_json(text)), param)
    except orjson.JSONDecodeError:
        raise BadRequestError("The structural tag is not standard JSON.", param=param) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = joined(keys_of(StructuralTagFormat, first["loc"])) or ""
        raise BadRequestError(f"Invalid structural tag at '{place}': {first['msg']}.", param=param) from None


def _tag(form: TagFormat, param: str) -> Tag:
    return Tag(begin=form.begin, content=_content(form.content, param), end=form.end)


def _content(content: Content, param: str) -> Constraint:
    match content:
        case SchemaContent():
            return JsonSchema(schema=content.json_schema, param=param)
        case RegexContent():
            return Regex(pattern=content.pattern, param=param)
        case GrammarContent():
            return Ebnf(text=content.grammar, param=param)
        case ConstantContent():
            return Choice(options=[content.value], param=param)
