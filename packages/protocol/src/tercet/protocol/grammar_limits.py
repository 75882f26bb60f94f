"""Limits on the work of a grammar, the same for the frontend that checks it and the scheduler that runs it."""

PARSER_LIMITS: dict[str, int] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
"""Arguments of llguidance's `LLParserLimits`. The time of a mask grows with the square of `step_max_items` where a
grammar is ambiguous: 20,000 items take at most about 70 ms, 50,000 take a second. 512 tags need about 15,000."""
SECONDS_PER_TOKEN = 0.01
"""Processor time that a token's mask may take on average."""
FREE_SECONDS = 2.0
"""Additional processor time for the masks of one request, all choices together."""
MOST_FORCED = 16_384
"""Bytes of text that a grammar may force at once."""
