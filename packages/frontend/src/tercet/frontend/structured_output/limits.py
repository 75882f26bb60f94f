"""Limits on the size of a constraint. A constraint within them may still take too long to compile and be refused."""

MAX_TEXT = 131_072
"""Bytes of a schema, a pattern or a grammar, and of all parts together if several are composed."""
MAX_DEPTH = 64
"""Levels of a schema, or brackets of a grammar."""
MAX_NODES = 20_000
"""Values in a schema."""
MAX_PATTERNS = 16_384
"""Characters of all patterns in a schema, whose translation blocks the event loop."""
MAX_GBNF = 65_536
"""Characters of a grammar that is translated, which blocks the event loop."""
MAX_SYMBOLS = 10_000
"""Symbols of a grammar."""
MAX_SET = 4_096
"""Characters between square brackets."""
MAX_OPTIONS = 4_096
"""Texts in a list of choices."""
MAX_TAGS = 512
MAX_TAG_TEXT = 32_768
"""Characters around the contents of all tags."""
MAX_TOOL_GRAMMARS = 32
"""Custom tools of a request that have a grammar, because each is checked separately."""
MAX_FREE_TOKENS = 1_000_000
"""Tokens of reasoning that a limit can allow."""
