"""Grammars for structured output: compiled and tried in a helper process."""
