"""Tool-call notations, one per file."""
