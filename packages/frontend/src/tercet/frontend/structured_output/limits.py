"""How large a constraint may be. What is within these bounds may still be refused for the time it takes to compile."""

MAX_TEXT = 131_072
"""Bytes of a schema, a pattern or a grammar; of everything together where several are composed."""
MAX_DEPTH = 64
"""Levels of a schema, or brackets of a grammar."""
MAX_NODES = 20_000
"""Values in a schema."""
MAX_GBNF = 65_536
"""Characters of a grammar that has to be translated, and so holds up the event loop."""
MAX_SYMBOLS = 10_000
"""In a grammar."""
MAX_SET = 4_096
"""Characters between square brackets."""
MAX_OPTIONS = 4_096
"""Texts to choose from."""
MAX_TAGS = 512
MAX_TAG_TEXT = 32_768
"""Characters around the contents of all tags."""
MAX_TOOL_GRAMMARS = 32
"""Custom tools of a request that have a grammar: each is tried out apart."""
MAX_FREE_TOKENS = 1_000_000
"""Tokens of reasoning that a limit can allow."""
