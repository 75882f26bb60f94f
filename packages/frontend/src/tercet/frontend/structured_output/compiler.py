"""Translation of a constraint to the `Grammar` that schedulers receive. `checker` tests whether it compiles."""

from tercet.frontend.constraints import Constraint, Ebnf, JsonObject, JsonSchema, Lark, Regex, Tokens
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.ebnf import to_lark
from tercet.frontend.structured_output.json_schema import check_schema, schema_text
from tercet.frontend.structured_output.lark import OBJECT, LarkWriter
from tercet.frontend.structured_output.limits import MAX_TEXT
from tercet.protocol.messages.values import Grammar, GrammarKind


def to_grammar(constraint: Constraint, tokens: Tokens) -> Grammar:
    """Return the grammar. Raises BadRequestError that names the parameter, and the keyword if one is at fault."""
    grammar = _translated(constraint, tokens)
    if len(grammar.text.encode()) > MAX_TEXT:
        raise BadRequestError(f"The grammar is longer than {MAX_TEXT} bytes.", param=constraint.param)
    return grammar


def _translated(constraint: Constraint, tokens: Tokens) -> Grammar:
    match constraint:
        case JsonObject():
            return Grammar(GrammarKind.JSON_SCHEMA, schema_text(OBJECT, constraint.param))
        case JsonSchema():
            check_schema(constraint.schema, constraint.param, strict=constraint.strict)
            return Grammar(
                GrammarKind.JSON_SCHEMA, schema_text(constraint.schema, constraint.param, strict=constraint.strict)
            )
        case Regex():
            return Grammar(GrammarKind.REGEX, constraint.pattern)
        case Ebnf():
            return Grammar(GrammarKind.LARK, to_lark(constraint.text, constraint.param))
        case Lark():
            if constraint.text.lstrip().startswith("{"):
                raise BadRequestError("A grammar in Lark begins with a rule.", param=constraint.param)
            return Grammar(GrammarKind.LARK, constraint.text)
    return Grammar(GrammarKind.LARK, LarkWriter(tokens).grammar(constraint))
