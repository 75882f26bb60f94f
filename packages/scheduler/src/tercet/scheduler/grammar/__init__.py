"""Grammars, which constrain an output and therefore its next tokens."""
