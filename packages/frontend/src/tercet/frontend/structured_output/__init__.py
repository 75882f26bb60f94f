"""Grammars for structured output, which a helper process compiles and tries."""
